"""Runs that are compared take turns, so that what else happens on the machine meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Run = Callable[[], None]
TimedRun = Callable[[], float]
"""Seconds that it took by its own clock."""
Seconds = dict[str, list[float]]


def timed(run: Run) -> TimedRun:
    """The same run, with its time."""

    def run_once() -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return run_once


def take_turns(runs: Mapping[str, TimedRun], rounds: int) -> Seconds:
    """Seconds of every run in every round. Each runs once before that, for page tables, threads, caches and
    windows of TCP; every second round goes the other way round."""
    seconds: Seconds = {name: [] for name in runs}
    for run in runs.values():
        run()
    for turn in range(rounds):
        for name in reversed(list(runs)) if turn % 2 else runs:
            seconds[name].append(runs[name]())
    return seconds


def speedup(seconds: Seconds, ours: str, baseline: str) -> float:
    """How many times faster ``ours`` is: the median over rounds, in which both are neighbours in time."""
    pairs = zip(seconds[ours], seconds[baseline], strict=True)
    return statistics.median(there / here for here, there in pairs)


def gigabytes_per_second(seconds: Seconds, total: int) -> dict[str, float]:
    """Of runs that each move so many bytes, at the median."""
    return {f"{name} GB/s": total / statistics.median(each) / 1e9 for name, each in seconds.items()}
