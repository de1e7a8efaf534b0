"""Scheduling: requests, KV blocks with prefix caching, the encoder cache manager, the scheduler, the engine's loop."""
