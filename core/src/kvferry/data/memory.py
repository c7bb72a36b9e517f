"""What this machine has to give: free memory under all limits, and huge pages.

Everything is read below a root folder that is handed in, so that a test can describe another machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

_ROOT = Path("/")
_KIB = 1024
_GIVES_HUGE_PAGES = frozenset({"always", "within_size", "advise", "force"})


@frozen
class AvailableMemory:
    """``size`` bytes can be taken without reclaiming anything that is in use; ``source`` says who
    sets the limit."""

    size: int
    source: str


@frozen
class ReservedHugePages:
    """Huge pages an administrator set aside: page size and how many bytes are not spoken for."""

    page_bytes: int
    free_bytes: int


def total_memory(root: Path = _ROOT) -> int | None:
    """What the machine has, or ``None`` where it does not tell."""
    return _meminfo(root).get("MemTotal")


def available_memory(root: Path = _ROOT) -> AvailableMemory:
    """The smallest of the kernel's estimate and the room in every control group around this process.

    A machine that tells nothing counts as unlimited. Any thread; some tens of microseconds.
    """
    found = [AvailableMemory(sys.maxsize, "no limit known")]
    free = _meminfo(root).get("MemAvailable")
    if free is not None:
        found.append(AvailableMemory(free, "MemAvailable of /proc/meminfo"))
    found.extend(_control_group_room(root))
    return min(found, key=lambda memory: memory.size)


def reserved_huge_pages(root: Path = _ROOT) -> ReservedHugePages:
    """Of the machine's default huge page size; zeros where there is no such thing."""
    info = _meminfo(root)
    page = info.get("Hugepagesize", 0)
    free = info.get("HugePages_Free", 0) - info.get("HugePages_Rsvd", 0)
    return ReservedHugePages(page, max(0, free) * page)


def memory_files_get_huge_pages(root: Path = _ROOT) -> bool:
    """Whether advice makes the kernel back memory files with transparent huge pages."""
    text = _read(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    _, bracket, rest = text.partition("[")
    return bool(bracket) and rest.partition("]")[0] in _GIVES_HUGE_PAGES


def _meminfo(root: Path) -> dict[str, int]:
    """Sizes in bytes; lines without a unit, as ``HugePages_Free``, are counts."""
    values = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * (_KIB if words[1:] == ["kB"] else 1)
    return values


def _control_group_room(root: Path) -> Iterator[AvailableMemory]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":  # version 2
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may name folders that only the host sees; the mount itself is
        # then the container's own group, so it is looked at in any case.
        folder = mount / path.strip("/")
        while True:
            room = _room(folder, *names)
            if room is not None:
                shown = f"/{folder.relative_to(root) / names[0]}"
                yield AvailableMemory(room, f"control group limit {shown}")
            if folder == mount:
                break
            folder = folder.parent


def _room(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit():  # "max", or no such control group
        return None
    reclaimable = 0
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == reclaimable_name and value.isdigit():
            reclaimable = int(value)
    return max(0, int(limit) - max(0, int(usage) - reclaimable))


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
