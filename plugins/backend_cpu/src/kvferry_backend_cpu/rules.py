"""CPU001 and following: what must hold for a tier in CPU memory."""

from __future__ import annotations

from kvferry.api import Check, Example, Known, Path, Rule, Severity

AVAILABLE = "host.memory_available_bytes"
RESERVED = "host.huge_pages_reserved_bytes"

_GIB = 1 << 30
_SHMEM = "host.huge_pages_shmem"
_IS_CPU = Path("tiers.*.use") == "cpu"


def _tier(**facts: object) -> dict[str, object]:
    return {"tiers.t.use": "cpu", **facts}


def _huge(capacity: int, shmem: str, reserved: int) -> dict[str, object]:
    return _tier(
        **{
            "tiers.t.huge_pages": "require",
            "tiers.t.capacity": capacity,
            _SHMEM: shmem,
            RESERVED: reserved,
        }
    )


RULES = (
    Rule(
        id="CPU001",
        severity=Severity.WARNING,
        each="tiers",
        when=_IS_CPU & Known(AVAILABLE),
        require=Check(
            f"tiers.*.capacity <= {AVAILABLE}",
            ("tiers.*.capacity", AVAILABLE),
            lambda capacity, available: bool(capacity <= available),
        ),
        message="the tier asks for {tiers.*.capacity:size} in every worker, and "
        f"{{{AVAILABLE}:size}} of memory are free on this machine now",
        fix="lower the capacity, or free memory before the engine starts: it refuses to open a tier "
        "that does not fit",
        source="design",
        examples=(
            Example(facts=_tier(**{"tiers.t.capacity": 8 * _GIB, AVAILABLE: 20 * _GIB}), passes=True),
            Example(facts=_tier(**{"tiers.t.capacity": 24 * _GIB, AVAILABLE: 20 * _GIB}), passes=False),
        ),
    ),
    Rule(
        id="CPU002",
        severity=Severity.ERROR,
        each="tiers",
        when=_IS_CPU & (Path("tiers.*.huge_pages") == "require"),
        require=Path(_SHMEM).one_of("always", "within_size", "advise", "force")
        | Check(
            f"{RESERVED} >= tiers.*.capacity",
            (RESERVED, "tiers.*.capacity"),
            lambda reserved, capacity: bool(reserved >= capacity),
        ),
        message="the tier requires huge pages for {tiers.*.capacity:size}, but the kernel gives none to "
        f"memory files (setting: {{{_SHMEM}}}) and {{{RESERVED}:size}} of reserved ones are free",
        fix="echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root), or reserve huge "
        "pages (vm.nr_hugepages), or huge_pages: auto",
        source="design",
        examples=(
            Example(facts=_huge(8 * _GIB, "advise", 0), passes=True),
            Example(facts=_huge(8 * _GIB, "never", 16 * _GIB), passes=True),
            Example(facts=_huge(8 * _GIB, "never", 4 * _GIB), passes=False),
        ),
    ),
)
