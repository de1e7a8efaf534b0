"""What runs on a rank's device and knows nothing of requests: collectives, caches, vision packing, models, sampler."""
