"""Facts about the disk that holds a path: device, file system, and what makes it slow."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mlx_flash.files import nearest

NETWORK = {"9p", "afpfs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "smbfs", "webdav"}
"""File systems whose bytes come over a network."""

NEARLY_FULL = 0.05
"""A disk with a smaller share free is nearly full: many SSDs are slower then."""

_BLOCK = Path("/sys/class/block")


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk.

    Attributes:
        device: name of the device, as the system mounts it.
        mount: where it is mounted.
        file_system: kind of file system.
        total_bytes, free_bytes: its room.
        is_network: its bytes come over a network.
        is_external: attached by a cable, as over USB; None where the system does not say.
        is_encrypted: encrypted by the system; None where it does not say.
    """

    device: str
    mount: str
    file_system: str
    total_bytes: int
    free_bytes: int
    is_network: bool
    is_external: bool | None
    is_encrypted: bool | None

    @property
    def is_nearly_full(self) -> bool:
        """True when little is free."""
        return self.free_bytes < NEARLY_FULL * self.total_bytes


def disk_of(path: Path) -> Disk:
    """Return the disk that holds a path, which need not exist yet."""
    found = nearest(path.expanduser()).resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if found.is_relative_to(part.mountpoint)]
    part = max(mounts, key=lambda part: len(Path(part.mountpoint).parts), default=None)
    device, mount, kind = ("?", "/", "?") if part is None else (part.device, part.mountpoint, part.fstype)
    usage = shutil.disk_usage(found)
    is_external, is_encrypted = _look_at_macos(mount) if sys.platform == "darwin" else _look_at_linux(device, found)
    return Disk(device, mount, kind, usage.total, usage.free, kind in NETWORK, is_external, is_encrypted)


def _look_at_linux(device: str, path: Path) -> tuple[bool | None, bool | None]:
    """Return whether a block device is external, and whether it is encrypted: through all devices that it lies on."""
    node = _BLOCK / Path(os.path.realpath(device)).name
    if not device.startswith("/dev/") or not node.exists():
        return None, None
    nodes = _with_slaves(node.resolve())
    is_external = any("/usb" in str(node) or _says(node, "removable", "1") for node in nodes)
    return is_external, any(_says(node, "dm/uuid", "CRYPT-") for node in nodes)


def _with_slaves(node: Path) -> list[Path]:
    """Return a block device, the disk that it is a part of, and those that they lie on."""
    found = [node, node.parent] if (node / "partition").exists() else [node]
    slaves = [slave.resolve() for each in found for slave in (each / "slaves").glob("*")]
    return found + [each for slave in slaves for each in _with_slaves(slave)]


def _says(node: Path, name: str, beginning: str) -> bool:
    file = node / name
    return file.is_file() and file.read_text().startswith(beginning)


def _look_at_macos(mount: str) -> tuple[bool | None, bool | None]:
    """Return what ``diskutil`` says: whether a disk is external, and whether it is encrypted."""
    try:
        done = subprocess.run(["diskutil", "info", "-plist", mount], capture_output=True, check=True, timeout=10)
        told: dict[str, Any] = plistlib.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, plistlib.InvalidFileException):
        return None, None
    internal, encrypted = told.get("Internal"), told.get("FileVault", told.get("Encryption"))
    return None if internal is None else not internal, encrypted
