"""Bytes from disk into memory that the caller owns."""
