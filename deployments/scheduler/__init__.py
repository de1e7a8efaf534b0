"""Scheduling: requests, KV blocks with prefix caching, the encoder cache manager, the scheduler and the engine's loop."""
