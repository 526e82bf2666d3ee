"""``python -m mlx_flash.monitor`` is ``flash-monitor``."""

import sys

from mlx_flash.monitor.app import main

if __name__ == "__main__":
    sys.exit(main())
