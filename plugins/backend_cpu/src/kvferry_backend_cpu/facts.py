"""What this host has for a tier in CPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvferry.api import Fact, HostEnvironment

AVAILABLE = "backend_cpu.memory_available_bytes"
RESERVED = "backend_cpu.reserved_huge_page_bytes"

_ORIGIN = "probe /proc/meminfo"


def cpu_memory_facts(environment: HostEnvironment) -> Iterator[Fact]:
    """Free memory and free reserved huge pages; what cannot be read is left out."""
    sizes = _meminfo(Path(environment.root) / "proc/meminfo")
    if "MemAvailable" in sizes:
        yield Fact(path=AVAILABLE, value=sizes["MemAvailable"] * 1024, origin=_ORIGIN)
    if "HugePages_Free" in sizes and "Hugepagesize" in sizes:
        pages = max(0, sizes["HugePages_Free"] - sizes.get("HugePages_Rsvd", 0))
        yield Fact(path=RESERVED, value=pages * sizes["Hugepagesize"] * 1024, origin=_ORIGIN)


def _meminfo(path: Path) -> dict[str, int]:
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    rows = (line.replace(":", " ").split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
