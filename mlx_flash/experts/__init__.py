"""Mixtures of experts: a pool, look-ahead, and layers that compute with the experts they route to."""
