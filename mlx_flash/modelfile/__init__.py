"""Modelfiles: model, prompts, sampling and streaming in one text."""
