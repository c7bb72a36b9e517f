"""What this host has for a tier on a disk: io_uring, and the file systems a path may lie on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen

from kvferry.api import Fact, FactKind, FactSource, FactSpec, HostEnvironment, format_size, parse_size
from kvferry_backend_ssd.refusal import uring_refusal

IO_URING = "ssd.io_uring"
POSSIBLE = "possible"
"""The value of this fact where nothing stands against it."""
FILE_SYSTEMS = "ssd.file_systems"
_MOUNTS = "proc/self/mountinfo"
_LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "overlay"))
"""Asked for their room. Others, such as a network's, could keep whoever asks waiting for ever."""
IN_MEMORY = frozenset(("tmpfs", "ramfs"))
NETWORK = frozenset(("nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "lustre", "9p", "fuse.sshfs", "afs"))
_MIB = 1 << 20
_OCTAL = re.compile(r"\\([0-7]{3})")

FACT_SPECS = (
    FactSpec(
        path=IO_URING,
        kind=FactKind.TEXT,
        meaning="'possible', or why tiers on a disk cannot use io_uring and take threads",
        source=FactSource.HOST,
        sample=POSSIBLE,
    ),
    FactSpec(
        path=FILE_SYSTEMS,
        kind=FactKind.TEXTS,
        meaning="mounted file systems: kind, rw or ro, size (or -), free space (or -), where",
        source=FactSource.HOST,
        sample="['ext4 rw 1000GB 800GB /']",
    ),
)


@frozen
class FileSystem:
    """One mounted file system. ``total`` and ``free`` are bytes, or ``None`` where nobody asked. In its
    text they are whole MiB, because people read it, and write it for hosts that are elsewhere."""

    kind: str
    writable: bool
    total: int | None
    free: int | None
    where: str

    def to_text(self) -> str:
        sizes = [_size_text(size) for size in (self.total, self.free)]
        return " ".join([self.kind, "rw" if self.writable else "ro", *sizes, self.where])

    @classmethod
    def parse(cls, text: str) -> FileSystem | None:
        """Inverse of :meth:`to_text` for whole MiB. Sizes may have any unit; ``None`` for any other text."""
        parts = text.split(" ", 4)
        if len(parts) != 5 or parts[1] not in ("rw", "ro"):
            return None
        kind, mode, total, free, where = parts
        try:
            sizes = [None if size == "-" else int(parse_size(size)) for size in (total, free)]
        except ValueError:
            return None
        return cls(kind, mode == "rw", sizes[0], sizes[1], where)


def _size_text(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size // _MIB}MiB" if size >= _MIB else format_size(size)


def file_system_of(path: str, systems: Sequence[str]) -> FileSystem | None:
    """Where ``path`` lies, as far as its name tells: the deepest mount above it. Of two at one place
    the later one covers the other. ``None`` for a relative path, or when nothing is known."""
    if not path.startswith("/"):
        return None
    plain = os.path.normpath(path)
    best: FileSystem | None = None
    for text in systems:
        system = FileSystem.parse(text)
        if system is None:
            continue
        where = system.where.rstrip("/")
        inside = plain == where or plain.startswith(where + "/") or not where
        if inside and (best is None or len(system.where) >= len(best.where)):
            best = system
    return best


def probe_facts(environment: HostEnvironment) -> Iterator[Fact]:
    """What can be found out; a fact that cannot be is left out, which rules see as unknown."""
    refusal = uring_refusal()
    yield Fact(path=IO_URING, value=refusal or POSSIBLE, origin="probe kvferry_native.io_uring_refusal")
    try:
        text = (Path(environment.root) / _MOUNTS).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    systems: dict[str, FileSystem] = {}  # of two at one place the later one covers the other
    for line in text.splitlines():
        systems.update((system.where, system) for system in _mounted(line, environment))
    told = tuple(system.to_text() for system in systems.values())
    yield Fact(path=FILE_SYSTEMS, value=told, origin=f"probe /{_MOUNTS}")


def _mounted(line: str, environment: HostEnvironment) -> Iterator[FileSystem]:
    """The file system of one line of the table, which has optional fields before a dash."""
    left, dash, right = line.partition(" - ")
    fields, behind = left.split(" "), right.split(" ")
    if not dash or len(fields) < 6 or len(behind) < 3:
        return
    where = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
    kind = behind[0]
    writable = "rw" in fields[5].split(",") and "rw" in behind[2].split(",")
    total = free = None
    if kind in _LOCAL:
        try:
            found = os.statvfs(os.path.join(environment.root, where.lstrip("/")))
        except OSError:
            pass
        else:
            total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if kind in _LOCAL | NETWORK | IN_MEMORY or behind[1].startswith("/"):
        yield FileSystem(kind, writable, total, free, where)
