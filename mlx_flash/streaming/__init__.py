"""Weights that flow through a few reusable buffers while the model runs."""
