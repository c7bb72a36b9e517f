"""Facts about the machine, read from the file system of the given environment."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from kvferry import __version__
from kvferry.api import API_VERSION, Fact, HostEnvironment
from kvferry.plugins.resolve import resolve

_MACHINE = "kvferry.data.memory"
"""Named by string like every implementation. It decides what is refused at the start, so a reading of
our own could differ from what then happens."""


def host_facts(environment: HostEnvironment) -> list[Fact]:
    """What can be read; a fact that cannot be read is left out, which rules see as unknown."""
    root = Path(environment.root)
    facts = [
        Fact(path="kvferry.version", value=__version__, origin="kvferry"),
        Fact(path="kvferry.api", value=API_VERSION, origin="kvferry"),
        Fact(path="host.python", value=platform.python_version(), origin="probe python interpreter"),
    ]
    candidates = (
        _cpus(),
        _memory(root),
        _available(root),
        _shared_memory(root),
        _huge_pages(root),
        _reserved(root),
    )
    facts += [fact for fact in candidates if fact is not None]
    return facts


def _cpus() -> Fact | None:
    # The number this process may use, which a container's limit lowers.
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
        return Fact(path="host.cpus", value=usable, origin="probe sched_getaffinity")
    count = os.cpu_count()
    return None if count is None else Fact(path="host.cpus", value=count, origin="probe cpu_count")


def _memory(root: Path) -> Fact | None:
    """The machine's memory, or the control group's limit where that is lower: a container dies at
    its limit however much the machine has."""
    total = _machine("total_memory", root)
    limit = _whole_number(root / "sys/fs/cgroup/memory.max")
    if total is None:
        return None
    value, origin = total, "probe /proc/meminfo"
    if limit is not None and limit < total:
        value, origin = limit, "probe /sys/fs/cgroup/memory.max"
    return Fact(path="host.memory_bytes", value=value, origin=origin)


def _available(root: Path) -> Fact | None:
    """What a tier may still take: the figure by which an arena is refused that does not fit."""
    found = _machine("available_memory", root)
    if found.size == sys.maxsize:
        return None
    return Fact(path="host.memory_available_bytes", value=found.size, origin=f"probe {found.source}")


def _reserved(root: Path) -> Fact | None:
    pages = _machine("reserved_huge_pages", root)
    if not pages.page_bytes:
        return None
    return Fact(path="host.huge_pages_reserved_bytes", value=pages.free_bytes, origin="probe /proc/meminfo")


def _shared_memory(root: Path) -> Fact | None:
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    free = found.f_bavail * found.f_frsize
    return Fact(path="host.shm_free_bytes", value=free, origin="probe /dev/shm")


def _huge_pages(root: Path) -> Fact | None:
    place = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    for word in _text(root / place).split():
        if word.startswith("[") and word.endswith("]"):
            return Fact(path="host.huge_pages_shmem", value=word[1:-1], origin=f"probe /{place}")
    return None


def _machine(what: str, root: Path) -> Any:
    return resolve(f"{_MACHINE}:{what}", what="the data plane's view of the machine")(root)


def _whole_number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
