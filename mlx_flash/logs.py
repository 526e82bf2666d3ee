"""The log."""

import logging

log = logging.getLogger("mlx_flash")
