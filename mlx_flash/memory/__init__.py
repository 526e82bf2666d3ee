"""Memory: how much there is, this process's footprint, the page cache, buffers that MLX computes from."""
