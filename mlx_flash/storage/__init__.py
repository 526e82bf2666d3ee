"""Safetensors files: headers, placement in buffers, parallel reads."""
