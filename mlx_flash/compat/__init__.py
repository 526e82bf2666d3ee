"""Every private or undocumented part of MLX and mlx-lm that mlx-flash relies on; checked when it is imported."""
