"""What 100,000 chunks on the SSD cost in memory, and how long a restart with them takes."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from pathlib import Path

from kvferry.api import ChunkHeader
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkFacts
from tests.bench.page_cache import drop
from tests.bench.ssd_tier import CHUNK_TOKENS, SSDTier, digest, header

CHUNKS = 100_000
CHUNK_BYTES = 4096
RESTARTS = 5


def _index(capacity: int) -> CacheManager:
    manager = CacheManager(
        capacity=capacity,
        chunk_tokens=CHUNK_TOKENS,
        block_tokens=CHUNK_TOKENS // 2,
        policy=LRU(),
        lease_seconds=30.0,
        write_seconds=30.0,
    )
    manager.grow(capacity)
    return manager


def _facts(found: ChunkHeader) -> ChunkFacts:
    return ChunkFacts(
        found.key.digest,
        found.parent,
        found.depth,
        found.tokens,
        found.aliases,
        found.owner,
        found.model,
        float("inf"),
    )


def _take_in(facts: list[ChunkFacts]) -> CacheManager:
    """As after a restart: all that the store holds goes into an index, heads first, and then learns in
    what order it was used."""
    index = _index(len(facts))
    index.copying.watch_freed()
    for each in sorted(facts, key=lambda found: found.depth):
        if not index.copying.adopt(each):
            raise RuntimeError("the index did not take a chunk in")
    digests = [each.digest for each in facts]
    for at in range(0, len(digests), 32):
        index.copying.used(digests[at : at + 32])
    return index


def index_bytes(chunks: int) -> float:
    """Python memory per chunk of the scheduler's index of a lower tier."""
    gc.collect()
    tracemalloc.start()
    try:
        index = _take_in([_facts(header(number, CHUNK_BYTES)) for number in range(chunks)])
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / index.stats().resident
    finally:
        tracemalloc.stop()


def backend_bytes(folder: Path, chunks: int) -> float:
    """Python memory per chunk that an open backend keeps on each rank."""
    gc.collect()
    tracemalloc.start()
    try:
        with SSDTier(folder, CHUNK_BYTES, chunks, 64) as tier:
            tier.recover()
            gc.collect()
            return tracemalloc.get_traced_memory()[0] / chunks  # the memory of values is a file
    finally:
        tracemalloc.stop()


def run(folder: Path, chunks: int = CHUNKS) -> dict[str, float]:
    """Fill a store in ``folder``, then open it several times.

    ``seconds`` is from opening to the last header, with the file out of the page cache; ``index_seconds``
    what the scheduler needs beside that to take the chunks in, in slices between its steps.
    """
    with SSDTier(folder, CHUNK_BYTES, chunks, 1024) as tier:
        tier.recover()
        tier.write()
    seconds, taking = [], []
    for _ in range(RESTARTS):
        drop(folder)
        gc.collect()
        tier = SSDTier(folder, CHUNK_BYTES, chunks, 64, before=0)
        began = time.perf_counter()
        with tier:
            headers = tier.recover()
            seconds.append(time.perf_counter() - began)
        if len(headers) != chunks or headers[0].key.digest != digest(0):
            raise RuntimeError(f"{len(headers)} of {chunks} chunks came back")
        facts = [_facts(found) for found in headers]
        began = time.perf_counter()
        _take_in(facts)
        taking.append(time.perf_counter() - began)
    figures = {
        "seconds": statistics.median(seconds),
        "index_seconds": statistics.median(taking),
        "scheduler_bytes": index_bytes(chunks),
        "rank_bytes": backend_bytes(folder, chunks),
    }
    return {**figures, "bytes_per_chunk": figures["scheduler_bytes"] + figures["rank_bytes"]}
