"""CORE040 to CORE059: what must hold between the configuration and the machine."""

from __future__ import annotations

from kvferry.api import Check, Example, Known, Path, Rule, Severity

COMFORTABLE = 0.8
"""Above this share of the memory the engine, the model and the page cache get squeezed."""

_GIB = 1 << 30
_WORKERS_KNOWN = Known("engine.workers")
_IN_MEMORY = "tiers.*[capabilities.addressable].capacity"
_SHARING = "sharing.*.host_bytes"
_MANY = ("engine.workers", _IN_MEMORY, _SHARING, "host.memory_bytes")
_ONE = (_IN_MEMORY, _SHARING, "host.memory_bytes")
_EACH = f"{{{_IN_MEMORY}:size}} each in tiers and {{{_SHARING}:size}} for sharing"
_ALONE = f"{{{_IN_MEMORY}:size}} in tiers and {{{_SHARING}:size}} for sharing"


def many_fit(share: float = 1) -> Check:
    """All workers of the engine together need at most this share of the memory."""
    return Check(
        f"engine.workers x (sum of tiers.*.capacity in memory and of sharing.*.host_bytes) <= "
        f"{shown(share)}host.memory_bytes",
        _MANY,
        lambda workers, capacities, sharing, memory: (
            workers * (sum(capacities) + sum(sharing)) <= share * memory
        ),
    )


def one_fits(share: float = 1) -> Check:
    """One worker needs at most this share of the memory."""
    return Check(
        f"sum of tiers.*.capacity in memory and of sharing.*.host_bytes <= {shown(share)}host.memory_bytes",
        _ONE,
        lambda capacities, sharing, memory: sum(capacities) + sum(sharing) <= share * memory,
    )


def shown(share: float) -> str:
    """``0.8 x ``, or nothing for the whole."""
    return "" if share == 1 else f"{share} x "


def _budget(
    capacity: int, workers: int | None = None, *, staging: int = 0, buffer: int = 0
) -> dict[str, object]:
    facts: dict[str, object] = {
        "tiers.cpu.capacity": capacity * _GIB,
        "tiers.cpu.capabilities.addressable": True,
        "host.memory_bytes": 32 * _GIB,
    }
    if staging:
        facts["sharing.staging.host_bytes"] = staging * _GIB
    if buffer:
        facts["sharing.landing.host_bytes"] = buffer * _GIB
    return facts if workers is None else {**facts, "engine.workers": workers}


HOST_RULES = (
    Rule(
        id="CORE040",
        severity=Severity.ERROR,
        when=_WORKERS_KNOWN,
        require=many_fit(),
        message=f"{{engine.workers}} workers with {_EACH} need more than the "
        "{host.memory_bytes:size} of memory that the machine has",
        fix="capacities and buffers are per worker: lower them to less than the memory divided by "
        "{engine.workers}",
        source="design",
        examples=(
            Example(facts=_budget(8, workers=2), passes=True),
            Example(facts=_budget(8, workers=2, staging=4, buffer=1), passes=True),
            Example(facts=_budget(20, workers=2), passes=False),
            Example(facts=_budget(12, workers=2, staging=4, buffer=1), passes=False),
        ),
    ),
    Rule(
        id="CORE041",
        severity=Severity.WARNING,
        when=_WORKERS_KNOWN,
        require=many_fit(COMFORTABLE),
        requires=("CORE040",),
        message=f"{{engine.workers}} workers with {_EACH} leave little of the "
        "{host.memory_bytes:size} of memory to the engine and the model",
        fix="capacity is per worker: lower it, or make sure that nothing else needs the memory",
        source="design",
        examples=(
            Example(facts=_budget(8, workers=2), passes=True),
            Example(facts=_budget(15, workers=2), passes=False),
        ),
    ),
    Rule(
        id="CORE042",
        severity=Severity.ERROR,
        when=~_WORKERS_KNOWN,
        require=one_fits(),
        message=f"one worker alone with {_ALONE} needs more than the "
        "{host.memory_bytes:size} of memory that the machine has",
        fix="lower the capacity, or check the file on the machine that it is meant for",
        source="design",
        examples=(
            Example(facts=_budget(8), passes=True),
            Example(facts=_budget(40), passes=False),
            Example(facts=_budget(28, staging=8), passes=False),
        ),
    ),
    Rule(
        id="CORE043",
        severity=Severity.WARNING,
        when=~_WORKERS_KNOWN,
        require=one_fits(COMFORTABLE),
        requires=("CORE042",),
        message=f"one worker alone with {_ALONE} leaves little of the "
        "{host.memory_bytes:size} of memory to the engine and the model",
        fix="lower the capacity, or check the file on the machine that it is meant for",
        source="design",
        examples=(
            Example(facts=_budget(8), passes=True),
            Example(facts=_budget(30), passes=False),
        ),
    ),
    Rule(
        id="CORE044",
        severity=Severity.WARNING,
        when=Known("native.available"),
        require=Check(
            "native.available",
            ("native.available", "native.why"),
            lambda available, _why: bool(available),
        ),
        message="the native copy loops are not in use ({native.why}); NumPy copies instead, which "
        "is slower and holds the interpreter's lock longer",
        fix="pip install kvferry-native",
        source="measured: make bench, table copy",
        examples=(
            Example(facts={"native.available": True, "native.why": "found"}, passes=True),
            Example(facts={"native.available": False, "native.why": "not installed"}, passes=False),
        ),
    ),
    Rule(
        id="CORE045",
        severity=Severity.NOTE,
        when=Known("host.huge_pages_shmem"),
        require=Path("host.huge_pages_shmem").one_of("always", "within_size", "advise", "force"),
        message="the system gives no huge pages to memory files (setting: "
        "{host.huge_pages_shmem}), so first touches and copies are slower than they could be",
        fix="echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled  (as root)",
        source="measured: make bench, table copy",
        examples=(
            Example(facts={"host.huge_pages_shmem": "advise"}, passes=True),
            Example(facts={"host.huge_pages_shmem": "never"}, passes=False),
        ),
    ),
)
