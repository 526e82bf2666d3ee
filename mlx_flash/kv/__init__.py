"""KV caches, in memory and on disk."""
