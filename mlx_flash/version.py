"""The version of mlx-flash."""

VERSION = "0.2.0"
