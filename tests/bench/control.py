"""Control plane figures: ``match`` of 131,072 tokens among many resident chunks, and memory.

Run ``python -m tests.bench.control``.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
import tracemalloc
from typing import Any

from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite
from tests.bench import holds

CHUNK, BLOCK = 256, 128
PROMPT_CHUNKS = 512
STEP = 16  # chunks per reservation: two scheduler steps of 2,048 tokens


def _digest(*numbers: int) -> bytes:
    return hashlib.blake2b(repr(numbers).encode(), digest_size=32).digest()


def _prompt(number: int) -> list[bytes]:
    return [_digest(number, depth) for depth in range(PROMPT_CHUNKS)]


def _manager(capacity: int) -> CacheManager:
    manager = CacheManager(
        capacity=capacity,
        chunk_tokens=CHUNK,
        block_tokens=BLOCK,
        policy=LRU(),
        lease_seconds=30.0,
        write_seconds=30.0,
    )
    manager.grow(capacity)
    return manager


def _store(manager: CacheManager, number: int) -> list[tuple[float, float]]:
    """Seconds that each reservation, and its result, took."""
    keys = _prompt(number)
    writes = [
        ChunkWrite(
            key,
            keys[depth - 1] if depth else None,
            depth,
            CHUNK,
            ((_digest(number, depth, BLOCK), BLOCK),),
        )
        for depth, key in enumerate(keys)
    ]
    times = []
    for start in range(0, PROMPT_CHUNKS, STEP):
        batch = writes[start : start + STEP]
        began = time.perf_counter()
        reservation = manager.reserve("writer", "", batch, 0.0)
        reserved = time.perf_counter()
        if reservation.id is None:
            raise RuntimeError(f"nothing was granted: {reservation.items[0]}")
        manager.complete(reservation.id, range(len(batch)))
        times.append((reserved - began, time.perf_counter() - reserved))
    return times


def _no_tail(index: int) -> list[tuple[bytes, int]]:
    return []


def _match(manager: CacheManager, prompts: int, rounds: int) -> dict[str, float]:
    whole, slices = [], []
    for turn in range(rounds):
        # A stride that visits all parts of the table, so that no cache is warm by accident.
        keys = _prompt(turn * 7919 % prompts)
        began = time.perf_counter()
        match = manager.match("reader", keys, _no_tail, 0.0, PROMPT_CHUNKS * CHUNK)
        if match.lease is None or match.tokens != PROMPT_CHUNKS * CHUNK:
            raise RuntimeError(f"only {match.tokens} tokens were found")
        manager.release(match.lease)
        whole.append(time.perf_counter() - began)
        keys = _prompt((turn * 7919 + 13) % prompts)
        cursor = manager.match_in_slices("reader", keys, _no_tail, PROMPT_CHUNKS * CHUNK)
        more = True
        while more:
            began = time.perf_counter()
            more = cursor.advance(0.0)
            slices.append(time.perf_counter() - began)
        if cursor.match.lease is None:
            raise RuntimeError("nothing was found")
        manager.release(cursor.match.lease)
    return {
        "match_ms": statistics.median(whole) * 1e3,
        "slice_us": statistics.median(slices) * 1e6,
        "slice_p99_us": statistics.quantiles(slices, n=100)[98] * 1e6,
    }


def run(sizes: tuple[int, ...] = (10_000, 1_000_000), rounds: int = 200) -> dict[str, Any]:
    """By number of resident chunks: ``match`` of 512 with its release (median, ms), one slice of it
    (µs), a reservation of 16 chunks while the tier evicts, and its result (median, µs). Beside
    them, for the last of ``sizes``, bytes of Python memory per chunk, with everything that the
    manager keeps: keys, one alias per chunk, eviction order; and how long the holds of
    :mod:`tests.bench.holds` are."""
    results: dict[str, Any] = {}
    for size in sizes:
        prompts = size // PROMPT_CHUNKS
        gc.collect()
        tracemalloc.start()
        try:
            manager = _manager(prompts * PROMPT_CHUNKS)
            for number in range(prompts):
                _store(manager, number)
            gc.collect()
            memory = tracemalloc.get_traced_memory()[0] / manager.stats().resident
        finally:
            tracemalloc.stop()
        figures = _match(manager, prompts, rounds)
        times = [pair for extra in range(8) for pair in _store(manager, prompts + extra)]
        for name, seconds in zip(("reserve", "complete"), zip(*times, strict=True), strict=True):
            figures[f"{name}_{STEP}_us"] = statistics.median(seconds) * 1e6
            figures[f"{name}_{STEP}_p99_us"] = statistics.quantiles(seconds, n=100)[98] * 1e6
        results[f"resident_{size}"] = figures
        results["bytes_per_chunk"] = memory  # the last size stays: it is the largest
        del manager
    results["holds"] = holds.run()
    return results


def main() -> None:
    results = run()
    for name, figures in results.items():
        if not isinstance(figures, dict):
            print(f"{name:30s}{figures:10.1f}")
            continue
        print(name)
        for figure, value in figures.items():
            print(f"  {figure:28s}{value:10.3f}")


if __name__ == "__main__":
    main()
