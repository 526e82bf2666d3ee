"""Everything private or undocumented of MLX and mlx-lm that mlx-flash relies on."""
