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
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

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
SHAPES = ((8 << 20, 32), (1 << 20, 8))
"""Bytes of a chunk, and how many of them are under way at once."""
LMCACHE_BYTES, LMCACHE_BATCH = 8 << 20, 32

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
        for chunk_bytes, depth in SHAPES:
            results[f"{chunk_bytes >> 20} MiB"] = _against_fio(folder, chunk_bytes, depth, results)
        results["checksum"] = _checksum(results)
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


def _against_fio(folder: Path, chunk_bytes: int, depth: int, results: dict[str, Any]) -> dict[str, Any]:
    """Reads and durable writes of chunks, with as many under way as fio has blocks.

    The tier is full before the clock runs, as in use: chunks go to slots that held others.
    """
    file = folder / "baseline"
    jobs = {
        "read": {"fio": FioJob(write=False, block=chunk_bytes, depth=depth, total=TOTAL_BYTES)},
        "write": {
            "fio, one flush at the end": FioJob(
                write=True, block=chunk_bytes, depth=depth, total=TOTAL_BYTES
            ),
            f"fio, a flush every {depth}": FioJob(
                write=True, block=chunk_bytes, depth=depth, total=TOTAL_BYTES, flush_every=depth
            ),
        },
    }
    missing = fio_missing()
    if missing:
        results["left_out"][f"fio with {chunk_bytes >> 20} MiB"] = missing
        jobs = {"read": {}, "write": {}}
    for job in (*jobs["read"].values(), *jobs["write"].values()):
        results["commands"].append(" ".join(job.command("FILE")))
    store = _fresh(folder / "store")
    with SSDTier(store, chunk_bytes, TOTAL_BYTES // chunk_bytes, depth) as tier:
        tier.recover()
        if not tier.direct:
            results["left_out"][f"{chunk_bytes >> 20} MiB"] = f"{PLACE} has no direct I/O"
            return {}
        first = tier.write()
        if jobs["write"]:
            FioJob(write=True, block=chunk_bytes, depth=depth, total=TOTAL_BYTES).run(file)

        def rewrite() -> float:
            tier.clear()
            return tier.write()

        def baseline(which: str) -> dict[str, Run]:
            return {name: (lambda job=job: job.run(file)) for name, job in jobs[which].items()}

        row = {
            "first write GB/s": TOTAL_BYTES / first / 1e9,
            "read": take_turns({"kvferry": tier.read, **baseline("read")}, TOTAL_BYTES, ROUNDS),
            "write": take_turns({"kvferry": rewrite, **baseline("write")}, TOTAL_BYTES, ROUNDS),
        }
    shutil.rmtree(store)
    file.unlink(missing_ok=True)
    return row


def _checksum(results: Mapping[str, Any]) -> dict[str, float]:
    """What the checksum of a chunk takes on one thread, as a part of the time in which the disk moves the
    chunk. Nothing overlaps in this figure; in the backend nearly all does."""
    from kvferry_backend_ssd.reading import checksum

    chunks = [np.random.default_rng(seed).bytes(8 << 20) for seed in range(16)]
    times = []
    for turn in range(160):
        view = memoryview(chunks[turn % len(chunks)])  # in turns, so that none is in the caches
        began = time.perf_counter()
        checksum(view, b"")
        times.append(time.perf_counter() - began)
    rate = (8 << 20) / statistics.median(times) / 1e9
    figures = {"GB/s": rate}
    for shape in (f"{chunk_bytes >> 20} MiB" for chunk_bytes, _ in SHAPES):
        for direction in ("read", "write"):
            row = results[shape].get(direction)
            if row is not None:
                figures[f"to {direction}, {shape}"] = row["kvferry GB/s"] / rate
    return figures


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
    chunks, size, batch = TOTAL_BYTES // LMCACHE_BYTES, LMCACHE_BYTES, LMCACHE_BATCH
    ours, theirs = _fresh(folder / "ours"), _fresh(folder / "theirs")
    batches = [range(first, first + batch) for first in range(0, chunks, batch)]
    seconds: dict[str, list[float]] = {}
    with (
        SSDTier(ours, size, chunks, batch, direct=direct) as tier,
        LMCacheDisk(python, theirs, size, batch, direct=direct) as other,
    ):
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
        for turn in range(ROUNDS + 1):
            for direction, variants in sides.items():
                for name in sorted(variants, reverse=turn % 2 == 1):
                    drop(ours if name == "kvferry" else theirs)
                    seconds.setdefault(f"{direction} {name}", []).append(variants[name]())
            tier.clear()
            for numbers in batches:
                other.remove(numbers[0])
    shutil.rmtree(ours)
    shutil.rmtree(theirs)
    return {direction: _compared(seconds, direction) for direction in sides}


def _compared(seconds: Mapping[str, list[float]], direction: str) -> dict[str, float]:
    # The first round met memory and files that were new.
    here, there = seconds[f"{direction} kvferry"][1:], seconds[f"{direction} LMCache"][1:]
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
