"""Models of mlx-vlm, which see and hear: a streamed language model, and towers that are read when a picture comes."""
