"""How long one hold of the manager's lock is, for each kind of work that is cut into slices.

Run ``python -m tests.bench.holds``.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvferry.api import EvictionPolicy
from kvferry.control.clearing import ClearCursor, QuotaCursor
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite
from kvferry.runtime.keeping import PINNED_AT_ONCE, TAKEN_AT_ONCE, TOLD_AT_ONCE
from kvferry.runtime.scheduler import EXPIRED_AT_ONCE
from kvferry_eviction_policies.isolated_lru import IsolatedLRU
from kvferry_eviction_policies.options import IsolatedLRUOptions

CHUNK, BLOCK = 256, 128
CHAIN = 512
CHAINS = 128
ALWAYS = 1e9

Chain = list[bytes]


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()


def _chain(number: int) -> Chain:
    return [_digest(number, depth) for depth in range(CHAIN)]


def _writes(chain: Chain, start: int = 0) -> list[ChunkWrite]:
    return [
        ChunkWrite(
            chain[depth],
            chain[depth - 1] if depth else None,
            depth,
            CHUNK,
            ((_digest(chain[depth], BLOCK), BLOCK),),
        )
        for depth in range(start, CHAIN)
    ]


def _manager(policy: EvictionPolicy, **more: Any) -> CacheManager:
    manager = CacheManager(
        capacity=CHAINS * CHAIN,
        chunk_tokens=CHUNK,
        block_tokens=BLOCK,
        policy=policy,
        lease_seconds=ALWAYS,
        write_seconds=ALWAYS,
        max_pinned=1.0,
        **more,
    )
    manager.grow(CHAINS * CHAIN)
    return manager


def _fill(manager: CacheManager, ttl: float | None = None, salt: str = "") -> list[Chain]:
    """All of it, with chains that grew side by side, as requests do."""
    chains = [_chain(number) for number in range(CHAINS)]
    for start in range(0, CHAIN, 16):
        for number, chain in enumerate(chains):
            owner = salt or f"salt {number}"
            writes = _writes(chain, start)[:16]
            answer = manager.reserve("w", owner, writes, 0.0, ttl=ttl, content=lambda write: write.depth)
            if answer.id is None:
                raise RuntimeError(f"nothing was granted: {answer.items[0]}")
            manager.complete(answer.id, range(len(writes)))
    return chains


Held = Iterator[Callable[[], object]]
"""Calls, each of which is one hold of the lock."""


def _to_the_end(cursor: ClearCursor | QuotaCursor) -> Held:
    more = True

    def advance() -> None:
        nonlocal more
        more = cursor.advance()

    while more:
        yield advance


def _clear(manager: CacheManager, chains: list[Chain]) -> Held:
    del chains
    return _to_the_end(manager.clear_in_slices())


def _scan(manager: CacheManager, chains: list[Chain]) -> Held:
    del chains
    for _ in range(200):
        cursor = manager.clear_in_slices("nobody's")
        yield cursor.advance


def _pin(manager: CacheManager, chains: list[Chain]) -> Held:
    for number, chain in enumerate(chains):
        for end in range(PINNED_AT_ONCE, CHAIN + 1, PINNED_AT_ONCE):
            yield lambda key=chain[end - 1], name=str(number): manager.pin("", name, key, 1.0, 0.0)


def _unpin(manager: CacheManager, chains: list[Chain]) -> Held:
    for number in range(len(chains)):
        manager.unpin(str(number))
    while manager.next_deadline() <= 0.0:
        yield lambda: manager.expire(0.0, EXPIRED_AT_ONCE)


def _take(manager: CacheManager, chains: list[Chain]) -> Held:
    del chains
    for _ in range(CHAINS * CHAIN // TAKEN_AT_ONCE):
        yield lambda: manager.take_events(TAKEN_AT_ONCE)


def _tell(manager: CacheManager, chains: list[Chain]) -> Held:
    """Half of the facts were lost while nobody listened."""
    while manager.take_events(CHAIN):
        pass
    for chain in chains:
        for start in range(0, CHAIN, TOLD_AT_ONCE):
            part = chain[: start + TOLD_AT_ONCE]
            yield lambda part=part, start=start: manager.tell(part, start, lambda index: index)
            manager.take_events(CHAIN)


def _prolong(manager: CacheManager, chains: list[Chain]) -> Held:
    for chain in chains:
        for end in range(PINNED_AT_ONCE, CHAIN + 1, PINNED_AT_ONCE):
            yield lambda key=chain[end - 1]: manager.prolong(key, 1.0, 5.0)


def _expire(manager: CacheManager, chains: list[Chain]) -> Held:
    del chains
    while manager.next_deadline() <= 10.0:
        yield lambda: manager.expire(10.0, EXPIRED_AT_ONCE)


def _look(manager: CacheManager, chains: list[Chain]) -> Held:
    del chains
    for _ in range(200):
        cursor = manager.enforce_quotas()
        yield cursor.advance


def _enforce(manager: CacheManager, chains: list[Chain]) -> Held:
    del chains
    manager.set_default_quota(0)
    return _to_the_end(manager.enforce_quotas())


def _measure(held: Held) -> dict[str, float]:
    """Median and 99th percentile (microseconds by the clock on the wall) and median of processor time."""
    wall, processor = [], []
    for call in held:
        cpu, began = time.thread_time(), time.perf_counter()
        call()
        ended = time.perf_counter()
        wall.append(ended - began)
        processor.append(time.thread_time() - cpu)
    return {
        "us": statistics.median(wall) * 1e6,
        "p99_us": statistics.quantiles(wall, n=100)[98] * 1e6,
        "cpu_us": statistics.median(processor) * 1e6,
    }


def run() -> dict[str, float]:
    """Each kind of hold in a tier of 65,536 chunks in chains of 512."""
    facts = CHAINS * CHAIN
    apart = IsolatedLRU(IsolatedLRUOptions(default=CHAIN))
    plans: list[tuple[CacheManager, float | None, str, dict[str, Callable[..., Held]]]] = [
        (
            _manager(LRU(), events=facts),
            None,
            "one",
            {"take_events": _take, "pin": _pin, "unpin": _unpin, "scan": _scan, "clear": _clear},
        ),
        (_manager(LRU(), events=facts // 2), None, "one", {"tell": _tell}),
        (_manager(LRU()), 5.0, "one", {"prolong": _prolong, "expire": _expire}),
        (_manager(apart, quotas=apart), None, "", {"quota_look": _look, "quota_evict": _enforce}),
    ]
    figures = {}
    while plans:
        manager, ttl, salt, kinds = plans.pop(0)
        chains = _fill(manager, ttl, salt)
        gc.collect()
        for name, held in kinds.items():
            for figure, value in _measure(held(manager, chains)).items():
                figures[f"{name}_{figure}"] = value
        del manager, chains
    return figures


def main() -> None:
    for name, value in run().items():
        print(f"{name:28s}{value:10.1f}")


if __name__ == "__main__":
    main()
