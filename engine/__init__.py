"""The inference engine: scheduling, KV cache, sampling, stopping, generation."""
