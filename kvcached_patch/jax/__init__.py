"""KV caches of JAX models, by layer, whatever the order the runner keeps them in."""
