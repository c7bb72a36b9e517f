"""The SSD backend against fio and against LMCache's local disk backend; index memory; restarts.

Run ``python -m tests.bench.disk``. Variants take turns, and who begins a round changes from one to the next:
what a virtual disk gives varies by a factor of two within a minute, and what was written last is read
faster. A ratio is the median over the rounds, each of which compares neighbours in time. The files lie in
``/var/tmp`` and need some gigabytes.
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from attrs import frozen

from tests.bench import restart
from tests.bench.fio import FioJob, fio_missing
from tests.bench.lmcache_disk import LMCacheDisk, LMCacheMissing, make_environment
from tests.bench.page_cache import drop
from tests.bench.ssd_tier import SSDTier

PLACE = "/var/tmp"
"""On a real disk, where /tmp may be memory."""
ROOM_BYTES = 12 << 30
TOTAL_BYTES = 2 << 30
ROUNDS = 7


@frozen
class Shape:
    """Chunks of ``chunk_bytes``. fio has ``depth`` of them at the disk at once; of ours, ``window`` are
    handed over and not acknowledged, and ``at_disk`` says whether no more than ``depth`` of those are at the
    disk."""

    chunk_bytes: int
    depth: int
    window: int
    at_disk: bool = False


SHAPES = {
    "8 MiB": Shape(8 << 20, 32, 32),
    "1 MiB, 8 at the disk": Shape(1 << 20, 8, 64, at_disk=True),
    "1 MiB, 8 not acknowledged": Shape(1 << 20, 8, 8),
}
LMCACHE_BYTES, LMCACHE_BATCH = 8 << 20, 32
_LMCACHE_CHUNKS = TOTAL_BYTES // LMCACHE_BYTES

Run = Callable[[], float]
"""Does the work once; the seconds that count."""


def run() -> dict[str, Any]:
    """GB/s of every variant and ratios of ours to the others, by row; above 1 is faster. ``left_out`` says
    what was not measured and why; ``commands`` are those of the baselines."""
    if importlib.util.find_spec("kvferry_backend_ssd") is None:
        return {"left_out": {"everything": "kvferry-backend-ssd is not installed"}}
    if shutil.disk_usage(PLACE).free < ROOM_BYTES:
        return {"left_out": {"everything": f"{PLACE} has less than {ROOM_BYTES >> 30} GiB left"}}
    results: dict[str, Any] = {"left_out": {}, "commands": []}
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=PLACE) as name:
        folder = Path(name)
        for name, shape in SHAPES.items():
            results[name] = _against_fio(folder, name, shape, results)
        results["restart"] = restart.run(_fresh(folder / "restart"))
        shutil.rmtree(folder / "restart")
        results["lmcache"] = _against_lmcache(folder, results["left_out"])
    return results


def take_turns(variants: Mapping[str, Run], total: int, rounds: int) -> dict[str, float]:
    """Median GB/s of every variant, and of the first one to each of the others."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        order = list(variants) if turn % 2 == 0 else list(reversed(variants))
        for name in order:
            seconds[name].append(variants[name]())
    ours, *others = variants
    figures = {f"{name} GB/s": total / statistics.median(values) / 1e9 for name, values in seconds.items()}
    for name in others:
        ratios = [there / here for here, there in zip(seconds[ours], seconds[name], strict=True)]
        figures[f"to {name}"] = statistics.median(ratios)
    return figures


def _against_fio(folder: Path, name: str, shape: Shape, results: dict[str, Any]) -> dict[str, Any]:
    """Reads and durable writes of chunks. The tier is full before the clock runs, as in use: chunks go to
    slots that held others."""
    # Here because whoever lacks the plugin still has the other rows.
    from kvferry_backend_ssd.backend import READ_LANES, WRITE_LANES

    file, chunk_bytes = folder / "baseline", shape.chunk_bytes

    def job(write: bool, durable: bool = False) -> FioJob:
        return FioJob(write=write, block=chunk_bytes, depth=shape.depth, total=TOTAL_BYTES, durable=durable)

    jobs = {
        "read": {"fio": job(write=False)},
        "write": {
            "fio, one flush at the end": job(write=True),
            "fio, each durable": job(write=True, durable=True),
        },
    }
    missing = fio_missing()
    if missing:
        results["left_out"][f"fio with {name}"] = missing
        jobs = {"read": {}, "write": {}}
    commands = [" ".join(each.command("FILE")) for which in jobs.values() for each in which.values()]
    results["commands"] += [each for each in commands if each not in results["commands"]]
    store = _fresh(folder / "store")

    def opened(lanes: int) -> SSDTier:
        depth = {"depth": shape.depth // lanes} if shape.at_disk else {}
        return SSDTier(store, chunk_bytes, TOTAL_BYTES // chunk_bytes, shape.window, **depth)

    def baseline(which: str) -> dict[str, Run]:
        return {name: (lambda each=each: each.run(file)) for name, each in jobs[which].items()}

    with opened(WRITE_LANES) as tier:
        tier.recover()
        if not tier.direct:
            results["left_out"][name] = f"{PLACE} has no direct I/O"
            return {}
        first = tier.write()
        if jobs["write"]:
            job(write=True).run(file)

        def rewrite() -> float:
            tier.clear()
            return tier.write()

        writes = take_turns({"kvferry": rewrite, **baseline("write")}, TOTAL_BYTES, ROUNDS)
        if "checksum" not in results:
            results["checksum"] = _checksum(tier, rewrite)
    with opened(READ_LANES) as tier:
        tier.recover()
        reads = take_turns({"kvferry": tier.read, **baseline("read")}, TOTAL_BYTES, ROUNDS)
    shutil.rmtree(store)
    file.unlink(missing_ok=True)
    return {"first write GB/s": TOTAL_BYTES / first / 1e9, "read": reads, "write": writes}


class _Unread:
    """Equal to any checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _checksum(tier: SSDTier, rewrite: Run) -> dict[str, float]:
    """What checksums add to the time of reading and of writing, as a part of it: the same work with a
    function in their place that looks at no byte."""

    def without(run: Run, module: str, instead: object) -> Run:
        def go() -> float:
            with mock.patch(f"kvferry_backend_ssd.{module}.checksum", return_value=instead):
                return run()

        return go

    writing = take_turns(
        {"without": without(rewrite, "writing", bytes(16)), "with": rewrite}, TOTAL_BYTES, ROUNDS
    )
    rewrite()  # the last round may have left values without checksums
    reading = take_turns(
        {"without": without(tier.read, "reading", _Unread()), "with": tier.read}, TOTAL_BYTES, ROUNDS
    )
    return {
        "of the time to read": 1 - 1 / reading["to with"],
        "of the time to write": 1 - 1 / writing["to with"],
    }


def _against_lmcache(folder: Path, left_out: dict[str, str]) -> dict[str, Any]:
    """Batches of the same chunks on both sides: opened alike, flushed before they count as stored, and out
    of the page cache before they are read."""
    try:
        python = make_environment(folder / "environment")
        return {
            "direct" if direct else "buffered": _one_mode(folder, python, direct) for direct in (True, False)
        }
    except LMCacheMissing as missing:
        left_out["LMCache"] = str(missing)
        return {}


def _one_mode(folder: Path, python: Path, direct: bool) -> dict[str, dict[str, float]]:
    """Every round has files and memory of its own on both sides: where on a virtual disk and in which pages
    of memory they come to lie makes more of a difference than anything else, for as long as they exist."""
    seconds: dict[str, list[float]] = {}
    for turn in range(ROUNDS):
        ours, theirs = _fresh(folder / "ours"), _fresh(folder / "theirs")
        with ExitStack() as stack:
            opened: dict[str, Any] = {}
            for name in sorted(("kvferry", "LMCache"), reverse=turn % 2 == 1):
                opened[name] = stack.enter_context(
                    SSDTier(ours, LMCACHE_BYTES, _LMCACHE_CHUNKS, LMCACHE_BATCH, direct=direct)
                    if name == "kvferry"
                    else LMCacheDisk(python, theirs, LMCACHE_BYTES, LMCACHE_BATCH, direct=direct)
                )
            _one_round(opened["kvferry"], opened["LMCache"], (ours, theirs), turn, seconds)
        shutil.rmtree(ours)
        shutil.rmtree(theirs)
    return {direction: _compared(seconds, direction) for direction in ("write", "read", "read again")}


def _one_round(
    tier: SSDTier,
    other: LMCacheDisk,
    folders: tuple[Path, Path],
    turn: int,
    seconds: dict[str, list[float]],
) -> None:
    """Both sides store once without the clock, so that nothing is done for the first time, and read what lies
    in new files on both. Then the tier is full, as in use: the same goes to the slots that it had, where
    LMCache makes new files again."""
    batches = [range(first, first + LMCACHE_BATCH) for first in range(0, _LMCACHE_CHUNKS, LMCACHE_BATCH)]
    tier.recover()
    sides: dict[str, dict[str, Run]] = {
        "write": {
            "kvferry": lambda: sum(tier.batch(numbers, write=True) for numbers in batches),
            "LMCache": lambda: sum(other.put(numbers[0]) for numbers in batches),
        },
        "read": {
            "kvferry": lambda: sum(tier.batch(numbers, write=False) for numbers in batches),
            "LMCache": lambda: sum(other.get(numbers[0]) for numbers in batches),
        },
    }

    def timed(direction: str, row: str) -> None:
        for name in sorted(sides[direction], reverse=turn % 2 == 1):
            for folder in folders:
                drop(folder)
            seconds.setdefault(f"{row} {name}", []).append(sides[direction][name]())

    for run in sides["write"].values():
        run()
    timed("read", "read")
    tier.clear()
    for numbers in batches:
        other.remove(numbers[0])
    timed("write", "write")
    timed("read", "read again")


def _compared(seconds: Mapping[str, list[float]], direction: str) -> dict[str, float]:
    here, there = seconds[f"{direction} kvferry"], seconds[f"{direction} LMCache"]
    return {
        "kvferry GB/s": TOTAL_BYTES / statistics.median(here) / 1e9,
        "LMCache GB/s": TOTAL_BYTES / statistics.median(there) / 1e9,
        "ratio": statistics.median(theirs / ours for ours, theirs in zip(here, there, strict=True)),
    }


def _fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main() -> None:
    def show(what: Mapping[str, Any], indent: int = 0) -> None:
        for name, value in what.items():
            if isinstance(value, Mapping):
                print(" " * indent + name)
                show(value, indent + 2)
            elif isinstance(value, list):
                print("\n".join([" " * indent + name, *(f"  {each}" for each in value)]))
            else:
                print(" " * indent + f"{name:32s}", value if isinstance(value, str) else f"{value:10.3f}")

    show(run())


if __name__ == "__main__":
    main()
