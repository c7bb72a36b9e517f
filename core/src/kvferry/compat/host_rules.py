"""CORE040 to CORE059: what must hold between the configuration and the machine."""

from __future__ import annotations

from kvferry.api import Check, Example, Known, Path, Rule, Severity

_COMFORTABLE = 0.8
"""Above this share of the memory the engine, the model and the page cache get squeezed."""

_GIB = 1 << 30
_WORKERS_KNOWN = Known("engine.workers")
_MANY = ("engine.workers", "tiers.*.capacity", "host.memory_bytes")
_ONE = ("tiers.*.capacity", "host.memory_bytes")

_MANY_FIT = Check(
    "engine.workers x sum of tiers.*.capacity <= host.memory_bytes",
    _MANY,
    lambda workers, capacities, memory: workers * sum(capacities) <= memory,
)
_MANY_COMFORTABLE = Check(
    f"engine.workers x sum of tiers.*.capacity <= {_COMFORTABLE} x host.memory_bytes",
    _MANY,
    lambda workers, capacities, memory: workers * sum(capacities) <= _COMFORTABLE * memory,
)
_ONE_FITS = Check(
    "sum of tiers.*.capacity <= host.memory_bytes",
    _ONE,
    lambda capacities, memory: sum(capacities) <= memory,
)
_ONE_COMFORTABLE = Check(
    f"sum of tiers.*.capacity <= {_COMFORTABLE} x host.memory_bytes",
    _ONE,
    lambda capacities, memory: sum(capacities) <= _COMFORTABLE * memory,
)


def _budget(capacity: int, workers: int | None = None) -> dict[str, object]:
    facts: dict[str, object] = {
        "tiers.cpu.capacity": capacity * _GIB,
        "host.memory_bytes": 32 * _GIB,
    }
    return facts if workers is None else {**facts, "engine.workers": workers}


HOST_RULES = (
    Rule(
        id="CORE040",
        severity=Severity.ERROR,
        when=_WORKERS_KNOWN,
        require=_MANY_FIT,
        message="{engine.workers} workers with {tiers.*.capacity:size} each need more than the "
        "{host.memory_bytes:size} of memory that this machine has",
        fix="capacity is per worker: lower it to less than the memory divided by {engine.workers}",
        source="design",
        examples=(
            Example(facts=_budget(8, workers=2), passes=True),
            Example(facts=_budget(20, workers=2), passes=False),
        ),
    ),
    Rule(
        id="CORE041",
        severity=Severity.WARNING,
        when=_WORKERS_KNOWN & _MANY_FIT,
        require=_MANY_COMFORTABLE,
        message="{engine.workers} workers with {tiers.*.capacity:size} each leave little of the "
        "{host.memory_bytes:size} of memory to the engine and the model",
        fix="capacity is per worker: lower it, or make sure that nothing else needs the memory",
        source="design",
        examples=(
            Example(facts=_budget(8, workers=2), passes=True),
            Example(facts=_budget(15, workers=2), passes=False),
            Example(facts=_budget(20, workers=2), passes=True),
        ),
    ),
    Rule(
        id="CORE042",
        severity=Severity.ERROR,
        when=~_WORKERS_KNOWN,
        require=_ONE_FITS,
        message="one worker alone with {tiers.*.capacity:size} needs more than the "
        "{host.memory_bytes:size} of memory that this machine has",
        fix="lower the capacity, or check the file on the machine that it is meant for",
        source="design",
        examples=(
            Example(facts=_budget(8), passes=True),
            Example(facts=_budget(40), passes=False),
        ),
    ),
    Rule(
        id="CORE043",
        severity=Severity.WARNING,
        when=~_WORKERS_KNOWN & _ONE_FITS,
        require=_ONE_COMFORTABLE,
        message="one worker alone with {tiers.*.capacity:size} leaves little of the "
        "{host.memory_bytes:size} of memory to the engine and the model",
        fix="lower the capacity, or check the file on the machine that it is meant for",
        source="design",
        examples=(
            Example(facts=_budget(8), passes=True),
            Example(facts=_budget(30), passes=False),
            Example(facts=_budget(40), passes=True),
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
