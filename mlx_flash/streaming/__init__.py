"""Weights that pass through a few reusable slots while the model runs."""
