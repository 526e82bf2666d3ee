"""The command line, ``mlx-flash COMMAND``.

This module imports next to nothing, so that Ctrl-C ends the program without a traceback while everything else is
imported.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_INTERRUPTED = 130
"""The exit status that a shell reports for programs that SIGINT ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; None takes those of the process, which ends after this call.

    Returns:
        The exit status.
    """
    try:
        from mlx_flash.commands.dispatch import end_silently, run_command

        status = run_command(sys.argv[1:] if argv is None else argv)
        if argv is None:
            end_silently()
    except KeyboardInterrupt:
        sys.stderr.write("mlx-flash: interrupted\n")
        return EXIT_INTERRUPTED
    return status
