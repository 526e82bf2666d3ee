"""Where mlx-flash meets other programs: mlx-lm's own functions, and files that were written for others."""
