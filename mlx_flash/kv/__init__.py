"""The KV cache behind the same dial: paged, on disk, shared between sequences, remembered between runs."""
