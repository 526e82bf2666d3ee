"""``python -m mlx_flash.monitor`` is ``flash-monitor``."""

import sys

from mlx_flash.cli import monitor

if __name__ == "__main__":
    sys.exit(monitor())
