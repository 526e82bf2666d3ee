"""Where a model's bytes lie on disk, and which parameters they are."""
