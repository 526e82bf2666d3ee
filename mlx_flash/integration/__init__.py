"""The patch of mlx-lm and mlx-vlm, and the settings of Modelfiles for other programs."""
