"""``python -m mlx_flash`` is ``mlx-flash``."""

import sys

from mlx_flash.cli import main

if __name__ == "__main__":
    sys.exit(main())
