"""mlx-lm's own functions and server on streamed models."""
