"""A plan carried out on a model: the engine, its state for the monitor, checks before each call."""
