"""``mlx-flash service``: the server as a service of this user, which starts at login, and again after a fault."""

from __future__ import annotations

import argparse
import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from mlx_flash.commands.arguments import parse_arguments
from mlx_flash.commands.common import note
from mlx_flash.errors import ConfigError
from mlx_flash.files import home_directory, make_private, settings_file, write_atomically

NAME = "mlx-flash"

SECRETS = frozenset({"MLX_FLASH_API_KEY", "HF_TOKEN"})
"""Variables that are not written into a file: a key is given by ``--api-key-file``, a token by ``hf auth login``."""

Command = Sequence[str]


@dataclass(frozen=True, slots=True)
class Service:
    """The service as systemd or launchd has it: the file that defines it, and the system's commands for each action."""

    file: Path
    text: bytes
    install: Sequence[Command]
    status: Sequence[Command]
    logs: Sequence[Command]
    remove: Sequence[Command]


def service(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash service``: do something with the service, and return the status of the system's command."""
    if args.arguments and args.action != "install":
        raise ConfigError(f"service {args.action} takes no flags of serve: {' '.join(args.arguments)}")
    parse_arguments(["serve", *args.arguments])  # wrong flags are errors now, and not in a log
    command = [sys.executable, "-m", "mlx_flash", "serve", *args.arguments]
    make = agent if sys.platform == "darwin" else unit
    found = make(command, Path.cwd(), dict(_environment(os.environ)))
    if shutil.which(program := found.install[0][0]) is None:
        raise ConfigError(f"{program} is not on this machine: services need systemd or launchd. Hint: mlx-flash serve")
    if args.action == "install":
        for each in found.remove if found.file.exists() else ():
            subprocess.run(each, check=False)
        make_private(found.file.parent)
        write_atomically(found.file, found.text)
        print(f"wrote {found.file}", file=out, flush=True)
        if secrets := SECRETS & os.environ.keys():
            note(f"the service does not get {', '.join(sorted(secrets))}. Hint: --api-key-file FILE; hf auth login")
        if sys.platform != "darwin":
            note("it ends when you log out. Hint: loginctl enable-linger keeps your services")
    elif not found.file.exists():
        raise ConfigError(f"there is no {found.file}. Hint: mlx-flash service install --model MODEL")
    status = max([subprocess.run(each, check=False).returncode for each in getattr(found, args.action)])
    if args.action == "remove":
        found.file.unlink()
        print(f"removed {found.file}", file=out)
    return status


def _environment(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables that the server reads, which services do not inherit."""
    for name, value in sorted(variables.items()):
        is_read = name == "PATH" or name.startswith(("MLX_FLASH_", "HF_", "XDG_CONFIG_", "XDG_CACHE_"))
        if is_read and name not in SECRETS:
            yield name, value


def unit(command: Command, folder: Path, variables: Mapping[str, str]) -> Service:
    """Return a unit of systemd."""
    lines = [
        "[Unit]",
        "Description=mlx-flash server",
        "[Service]",
        "WorkingDirectory=" + str(folder).replace("%", "%%"),
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in variables.items()),
        f"ExecStart={' '.join(_quoted(word.replace('$', '$$')) for word in command)}",
        "Restart=on-failure",
        "[Install]",
        "WantedBy=default.target",
    ]
    file = settings_file().parents[1] / "systemd" / "user" / f"{NAME}.service"
    systemctl = ("systemctl", "--user")
    return Service(
        file,
        "".join(f"{line}\n" for line in lines).encode(),
        install=((*systemctl, "daemon-reload"), (*systemctl, "enable", "--now", NAME)),
        status=((*systemctl, "status", "--no-pager", NAME),),
        logs=(("journalctl", "--user", "--unit", NAME, "--lines", "100", "--no-pager"),),
        remove=((*systemctl, "disable", "--now", NAME),),
    )


def _quoted(text: str) -> str:
    for character, written in {"\\": "\\\\", '"': '\\"', "\n": "\\n", "%": "%%"}.items():
        text = text.replace(character, written)
    return f'"{text}"'


def agent(command: Command, folder: Path, variables: Mapping[str, str]) -> Service:
    """Return an agent of launchd."""
    library, target = home_directory() / "Library", f"gui/{os.getuid()}"
    file, log = library / "LaunchAgents" / f"{NAME}.plist", str(library / "Logs" / f"{NAME}.log")
    settings = {
        "Label": NAME,
        "ProgramArguments": list(command),
        "WorkingDirectory": str(folder),
        "EnvironmentVariables": dict(variables),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    return Service(
        file,
        plistlib.dumps(settings),
        install=(("launchctl", "bootstrap", target, str(file)),),
        status=(("launchctl", "print", f"{target}/{NAME}"),),
        logs=(("tail", "-n", "100", log),),
        remove=(("launchctl", "bootout", f"{target}/{NAME}"),),
    )
