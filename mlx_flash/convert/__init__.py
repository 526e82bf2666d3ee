"""Checkpoints rewritten on disk: packed in streaming order, or with the parameters that mlx-lm derives."""
