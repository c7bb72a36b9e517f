"""Span copies against plain memcpy of the same bytes, first touch, bounds checks and token packing.

Run: ``python tests/bench/span_copies.py``. Everything runs on one thread. Repetitions of all variants are
interleaved, so that what else the machine does hits them alike; figures are medians.
"""

from __future__ import annotations

import array
import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvferry.api import Region
from kvferry.data.arena import FirstTouch, MemoryFileArena
from kvferry.data.bounds import AddressColumn, CopyPlan, check_plan
from kvferry.data.copy import SpanCopier, choose_copier
from kvferry.data.native import find_native

POOL_BYTES = 512 << 20
FLAT_BYTES = 128 << 20
BATCH_BYTES = 8 << 20
PAGES = (65536, 4096)
REPETITIONS = 31
TOKENS = 131072
TARGETS = {65536: 0.9, 4096: 0.6}

Figures = dict[str, float]


def run() -> dict[str, object]:
    """All figures: GB/s, ratios to memcpy, microseconds, nanoseconds per token."""
    with_native = find_native().module is not None
    copiers = [choose_copier("native").copier] if with_native else []
    copiers.append(choose_copier("numpy").copier)
    pool, flat = MemoryFileArena("bench-pool", POOL_BYTES), MemoryFileArena("bench-flat", FLAT_BYTES)
    began = time.perf_counter()
    pool_region = pool.open()
    try:
        if pool.wait(600) is not FirstTouch.DONE:
            raise RuntimeError("the pool could not be touched")
        touch_seconds = time.perf_counter() - began
        flat_region = flat.open()
        flat.wait(600)
        copies = {
            f"{direction} {page // 1024} KiB": _measure_copies(
                copiers, pool_region, flat_region, page, direction == "gather"
            )
            for page in PAGES
            for direction in ("gather", "scatter")
        }
        checks = _measure_check(pool_region, flat_region)
    finally:
        pool.close()
        flat.close()
    return {
        "copies": copies,
        "targets": {f"{page // 1024} KiB": ratio for page, ratio in TARGETS.items()},
        "first_touch_gb_per_s": POOL_BYTES / touch_seconds / 1e9,
        "first_touch_pages": pool.pages().value,
        "check_plan_us": checks,
        "pack_tokens_ns": _measure_packing(),
    }


def _measure_copies(
    copiers: list[SpanCopier], pool: Region, flat: Region, page: int, gather: bool
) -> Figures:
    random = np.random.default_rng(page)
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memcpy.restype = ctypes.c_void_p
    seconds: dict[str, list[float]] = {name: [] for name in ["memcpy", *(c.name for c in copiers)]}
    place = 0

    def next_flat() -> int:
        # Never the piece just used: every variant meets memory that has left the caches.
        nonlocal place
        place = (place + BATCH_BYTES) % FLAT_BYTES
        return flat.address + place

    # Plans are made beforehand: making them would fill the caches before some variants and not others.
    work: list[tuple[str, Callable[[], object]]] = []
    for _ in range(REPETITIONS):
        for copier in copiers:
            spans = scattered(random, pool.address, next_flat(), page)
            columns = (spans[1], spans[0], spans[2]) if gather else spans
            work.append((copier.name, partial(copier.copy, *columns)))
        start = pool.address + int(random.integers(POOL_BYTES // BATCH_BYTES)) * BATCH_BYTES
        ends = (next_flat(), start) if gather else (start, next_flat())
        work.append(("memcpy", partial(memcpy, *ends, BATCH_BYTES)))
    for name, one in work:
        seconds[name].append(_timed(one))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    figures = {f"{name} GB/s": BATCH_BYTES / value / 1e9 for name, value in median.items()}
    ratios = {f"{c.name} ratio": median["memcpy"] / median[c.name] for c in copiers}
    return {**figures, **ratios}


def scattered(
    random: np.random.Generator, pool: int, flat: int, page: int
) -> tuple[AddressColumn, AddressColumn, AddressColumn]:
    """Pool pages in random order, their places in a row, lengths."""
    count = BATCH_BYTES // page
    pages = random.choice(POOL_BYTES // page, count, replace=False).astype(np.uint64)
    return (
        np.uint64(pool) + pages * np.uint64(page),
        np.uint64(flat) + np.arange(count, dtype=np.uint64) * np.uint64(page),
        np.full(count, page, np.uint64),
    )


def _measure_check(pool: Region, flat: Region) -> Figures:
    random = np.random.default_rng(1)
    planes = [
        Region(name=f"plane {i}", address=pool.address + i * (POOL_BYTES // 16), length=POOL_BYTES // 16)
        for i in range(16)
    ]
    figures = {}
    for page in PAGES:
        origin, target, length = scattered(random, pool.address, flat.address, page)
        plan = CopyPlan(target, origin, length)
        regions = [*planes, flat]
        times = [_timed(partial(check_plan, plan, regions)) for _ in range(99)]
        figures[f"{len(length)} spans"] = statistics.median(times) * 1e6
    return figures


def _measure_packing() -> Figures:
    tokens = np.random.default_rng(2).integers(0, 150_000, TOKENS).tolist()
    ways: dict[str, Callable[[], object]] = {"array": lambda: array.array("I", tokens).tobytes()}
    if find_native().module is not None:
        import kvferry_native

        ways["native"] = lambda: kvferry_native.pack_tokens(tokens)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPETITIONS):
        for name, pack in ways.items():
            times[name].append(_timed(pack))
    return {name: statistics.median(values) / TOKENS * 1e9 for name, values in times.items()}


def _timed(work: Callable[[], object]) -> float:
    # The thread's own time: where other programs want the processors, waiting for a turn is not work.
    began = time.thread_time()
    work()
    return time.thread_time() - began


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    figures = run()
    copies = figures["copies"]
    assert isinstance(copies, dict)
    table = Table(title=f"{BATCH_BYTES >> 20} MiB in pages scattered over {POOL_BYTES >> 20} MiB, one thread")
    columns = list(next(iter(copies.values())))
    for name in ("", *columns, "target"):
        table.add_column(name, justify="right" if name else "left")
    for name, row in copies.items():
        target = TARGETS[int(name.split()[1]) * 1024]
        table.add_row(name, *(f"{row[column]:.2f}" for column in columns), f"{target:.1f}")
    console = Console()
    console.print(table)
    console.print(
        f"first touch: {figures['first_touch_gb_per_s']:.2f} GB/s ({figures['first_touch_pages']} pages)"
    )
    for title, unit in (("check_plan", "us"), ("pack_tokens", "ns")):
        values = figures[f"{title}_{unit}"]
        assert isinstance(values, dict)
        shown = ", ".join(f"{name} {value:.1f} {unit}" for name, value in values.items())
        per = " per token" if unit == "ns" else ""
        console.print(f"{title}: {shown}{per}")


if __name__ == "__main__":
    main()
