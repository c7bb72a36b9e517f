"""SSD001 and following: what must hold for a tier on a disk."""

from __future__ import annotations

from kvferry.api import Check, Example, Expression, Known, Path, Rule, Severity
from kvferry_backend_ssd.facts import FILE_SYSTEMS, IN_MEMORY, IO_URING, NETWORK, POSSIBLE, file_system_of

_GIB = 1 << 30
_IS_SSD = Path("tiers.*.use") == "ssd"
_PLACE = ("tiers.*.path", FILE_SYSTEMS)
_ON_DISK = _IS_SSD & Known(FILE_SYSTEMS)
_DISK = "ext4 rw 1000GiB 800GiB /"


def _tier(**facts: object) -> dict[str, object]:
    return {"tiers.t.use": "ssd", "tiers.t.path": "/mnt/ssd/kv", FILE_SYSTEMS: (_DISK,), **facts}


def _at(*systems: str, capacity: int = 200 * _GIB) -> dict[str, object]:
    return _tier(**{FILE_SYSTEMS: systems, "tiers.t.capacity": capacity})


def _io(wanted: str, refusal: str) -> dict[str, object]:
    return _tier(**{"tiers.t.io": wanted, IO_URING: refusal})


def _kind_is_not(kinds: frozenset[str], what: str) -> Expression:
    def holds(path: str, systems: tuple[str, ...]) -> bool:
        found = file_system_of(path, systems)
        return found is None or found.kind not in kinds

    return Check(f"tiers.*.path lies on no file system {what}", _PLACE, holds)


def _writable(path: str, systems: tuple[str, ...]) -> bool:
    found = file_system_of(path, systems)
    return found is None or found.writable


def _fits(capacity: int, path: str, systems: tuple[str, ...]) -> bool:
    found = file_system_of(path, systems)
    return found is None or found.total is None or capacity <= found.total


def _all_fit(workers: int, capacity: int, path: str, systems: tuple[str, ...]) -> bool:
    return _fits(workers * capacity, path, systems)


RULES: tuple[Rule, ...] = (
    Rule(
        id="SSD001",
        severity=Severity.WARNING,
        each="tiers",
        when=_ON_DISK,
        require=_kind_is_not(IN_MEMORY, "in memory"),
        message="the folder {tiers.*.path} lies in memory (tmpfs): its chunks take memory a second time, and "
        "none of them outlives the machine",
        fix="choose a folder on a disk, or make the tier above larger instead",
        source="design",
        examples=(
            Example(facts=_at(_DISK), passes=True),
            Example(facts=_at(_DISK, "tmpfs rw 8GiB 8GiB /mnt"), passes=False),
        ),
    ),
    Rule(
        id="SSD002",
        severity=Severity.ERROR,
        each="tiers",
        when=_ON_DISK,
        require=Check("tiers.*.path lies on a writable file system", _PLACE, _writable),
        message="the folder {tiers.*.path} lies on a file system that is mounted read-only",
        fix="mount it for writing, or choose another path",
        source="design",
        examples=(
            Example(facts=_at(_DISK), passes=True),
            Example(facts=_at(_DISK, "xfs ro 1GiB 1GiB /mnt/ssd"), passes=False),
        ),
    ),
    Rule(
        id="SSD003",
        severity=Severity.ERROR,
        each="tiers",
        when=_ON_DISK,
        require=Check("tiers.*.capacity <= size of the file system", ("tiers.*.capacity", *_PLACE), _fits),
        message="the tier may take {tiers.*.capacity:size} in every worker, more than the file system of "
        "{tiers.*.path} has in all",
        fix="lower the capacity, or choose a folder on a larger disk",
        source="design",
        examples=(
            Example(facts=_at(_DISK), passes=True),
            Example(facts=_at(_DISK, capacity=2000 * _GIB), passes=False),
        ),
    ),
    Rule(
        id="SSD004",
        severity=Severity.ERROR,
        each="tiers",
        when=_IS_SSD & (Path("tiers.*.io") == "io_uring"),
        require=Path(IO_URING) == POSSIBLE,
        message=f"io: io_uring is asked for, and cannot be used here: {{{IO_URING}}}",
        fix="install kvferry-native and let the kernel give io_uring to us, or set  io: auto",
        source="design",
        examples=(
            Example(facts=_io("io_uring", POSSIBLE), passes=True),
            Example(facts=_io("io_uring", "the kernel refuses it with EPERM"), passes=False),
        ),
    ),
    Rule(
        id="SSD005",
        severity=Severity.NOTE,
        each="tiers",
        when=_IS_SSD & (Path("tiers.*.io") == "auto") & Known(IO_URING),
        require=Path(IO_URING) == POSSIBLE,
        message=f"the tier reads and writes with threads, because io_uring cannot be used: {{{IO_URING}}}",
        fix="install kvferry-native and let the kernel give io_uring to us, for less work of the processor; "
        "results are the same",
        source="measured",
        examples=(
            Example(facts=_io("auto", POSSIBLE), passes=True),
            Example(facts=_io("auto", "kvferry-native is not installed"), passes=False),
        ),
    ),
    Rule(
        id="SSD006",
        severity=Severity.WARNING,
        each="tiers",
        when=_ON_DISK,
        require=_kind_is_not(NETWORK, "of a network"),
        message="the folder {tiers.*.path} lies on a file system of a network, where a lock may not keep two "
        "engines apart and a flush may not reach a disk",
        fix="choose a folder on a disk of this machine",
        source="design",
        examples=(
            Example(facts=_at(_DISK), passes=True),
            Example(facts=_at(_DISK, "nfs4 rw - - /mnt"), passes=False),
        ),
    ),
    Rule(
        id="SSD007",
        severity=Severity.ERROR,
        each="tiers",
        when=_ON_DISK & Known("engine.workers"),
        require=Check(
            "engine.workers x tiers.*.capacity <= size of the file system",
            ("engine.workers", "tiers.*.capacity", *_PLACE),
            _all_fit,
        ),
        requires=("SSD003",),
        message="{engine.workers} workers with {tiers.*.capacity:size} each may take more than the file "
        "system of {tiers.*.path} has in all",
        fix="lower the capacity, which each worker has for itself, or choose a folder on a larger disk",
        source="design",
        examples=(
            Example(facts=_at(_DISK) | {"engine.workers": 4}, passes=True),
            Example(facts=_at(_DISK) | {"engine.workers": 8}, passes=False),
        ),
    ),
)
