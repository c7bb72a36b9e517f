"""A staging in host memory against memcpy of the same bytes: prefixes of 16 chunks of 4 MiB out of a tier.

Run ``python -m tests.bench.staging_copy``. Staging and memcpy take turns, and who begins changes from round
to round; a ratio is the median over the rounds. Both have the same number of threads, one and two, and memory
files that were touched before and are larger than the caches. A prefix is one batch, as a lease is, and the
next one is begun when it is told of. Also the time of a batch of one small chunk, in which nearly nothing is
copied.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from kvferry.api import Region, Span, StageCopy, Staging, StagingContext
from kvferry.data.arena import MemoryFileArena
from kvferry.data.mapping import create_region, region_view
from kvferry.testing.fake_instance import wait_until
from tests.bench.memcpy import memcpy
from tests.bench.turns import Run, gigabytes_per_second, speedup, take_turns, timed

CHUNK_BYTES = 4 << 20
CHUNKS = 16
PREFIXES = 4
SMALL_BYTES = 4096
ROUNDS = 15
SMALL_ROUNDS = 300
SECONDS = 60.0
TIER = "tier"
TOTAL_BYTES = CHUNK_BYTES * CHUNKS * PREFIXES


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    """By row ``<n> threads``: GB/s of the staging and of memcpy, and the median ratio. ``left_out`` says what
    was not measured and why."""
    if importlib.util.find_spec("kvferry_host_staging") is None:
        return {"left_out": {"everything": "kvferry-host-staging is not installed"}}
    from kvferry_host_staging.moving import choose_movement

    results: dict[str, Any] = {"copies": choose_movement().why, "left_out": {}}
    order = np.random.default_rng(5).permutation(TOTAL_BYTES // CHUNK_BYTES).tolist()
    for threads in (1, 2):
        if threads > len(os.sched_getaffinity(0)):
            results["left_out"][f"{threads} threads"] = "this machine has fewer processors"
            continue
        with (
            _touched(TIER) as tier,
            _touched("copy") as other,
            _staging(tier, threads) as staging,
        ):
            copies = [
                (other.address + number * CHUNK_BYTES, tier.address + place * CHUNK_BYTES, CHUNK_BYTES)
                for number, place in enumerate(order)
            ]
            runs = {"staging": timed(_stages(staging, order)), "memcpy": timed(memcpy(copies, threads))}
            seconds = take_turns(runs, rounds)
            small = timed(partial(_stage, staging, [StageCopy(Span(TIER, 0, SMALL_BYTES), 0)]))
            results[f"{threads} threads"] = {
                **gigabytes_per_second(seconds, TOTAL_BYTES),
                "to memcpy": speedup(seconds, "staging", "memcpy"),
                "one small chunk, us": 1e6 * statistics.median(small() for _ in range(SMALL_ROUNDS)),
            }
    return results


def _stages(staging: Staging, order: list[int]) -> Run:
    copies = [
        StageCopy(Span(TIER, place * CHUNK_BYTES, CHUNK_BYTES), number * CHUNK_BYTES)
        for number, place in enumerate(order)
    ]
    batches = [copies[start : start + CHUNKS] for start in range(0, len(copies), CHUNKS)]

    def run_once() -> None:
        for batch in batches:
            _stage(staging, batch)

    return run_once


def _stage(staging: Staging, copies: list[StageCopy]) -> None:
    ticket = staging.stage(copies, time.monotonic() + SECONDS)
    if not ticket.wait(SECONDS) or any(result.error for result in ticket.results):
        raise RuntimeError(f"the staging failed: {ticket.results[0].error}")


@contextmanager
def _touched(name: str) -> Iterator[Region]:
    with create_region(name, TOTAL_BYTES) as file:
        region_view(file.region)[:] = 1
        yield file.region


@contextmanager
def _staging(tier: Region, threads: int) -> Iterator[Staging]:
    from kvferry_host_staging.options import HostStagingOptions
    from kvferry_host_staging.staging import HostStaging

    arenas: list[MemoryFileArena] = []

    def make_arena(name: str, capacity: int, options: Any = None) -> MemoryFileArena:
        arenas.append(MemoryFileArena(name, capacity, options))
        return arenas[-1]

    staging = HostStaging(HostStagingOptions(threads=threads), TOTAL_BYTES)
    staging.open(StagingContext(name="staging", make_arena=make_arena, regions={TIER: tier}))
    try:
        wait_until(lambda: arenas[0].ready_bytes() >= TOTAL_BYTES, SECONDS, "memory that was never touched")
        yield staging
    finally:
        staging.close(time.monotonic() + SECONDS)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
