"""Guesses of the tokens that come next, which one pass over the weights checks."""
