"""The command line, ``mlx-flash COMMAND``.

This module imports next to nothing, so that Ctrl-C ends the program without a traceback while everything else is
imported.
"""

from __future__ import annotations

import os
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
    _open_standard_streams()
    try:
        from mlx_flash.commands.dispatch import end_silently, run_command

        status = run_command(sys.argv[1:] if argv is None else argv)
        if argv is None:
            end_silently()
    except KeyboardInterrupt:
        sys.stderr.write("mlx-flash: interrupted\n")
        return EXIT_INTERRUPTED
    return status


def monitor() -> int:
    """Run ``flash-monitor``, which is ``mlx-flash monitor``. Return the exit status."""
    words = sys.argv[1:]
    return main(words if words in (["--version"], ["-V"]) else ["monitor", *words])


def _open_standard_streams() -> None:
    """Open standard streams that the caller closed, as some services do.

    The files of a model would get their numbers: MLX takes 0 for an error, and what is printed would go to a file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # Python found no such descriptor; open() takes the lowest one that is free
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 open until the process ends
