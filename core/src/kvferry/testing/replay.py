"""Requests played to the real manager, and the most that any policy could have found."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import cast

from attrs import frozen

from kvferry.api import EvictionPolicy, QuotaPolicy
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite

_SAVED_AT_ONCE = 4
"""Chunks per reservation, as the scheduler saves them."""


@frozen
class ReplayRequest:
    """One request: the digests of its whole chunks from the head, and its cache salt.

    A digest stands for all chunks up to its own, as chunk keys do: the same digest never follows two
    others, nor two salts. Each request has some tokens more, so that every chunk can be found.
    """

    keys: tuple[bytes, ...]
    salt: str = ""


@frozen
class ReplayResult:
    """``found`` of ``asked`` chunks were there when their request came."""

    found: int
    asked: int

    @property
    def hit_ratio(self) -> float:
        return self.found / self.asked if self.asked else 0.0


def replay(
    policy: EvictionPolicy, requests: Sequence[ReplayRequest], capacity: int, *, quotas: bool = False
) -> ReplayResult:
    """Play ``requests`` one after the other to a manager with ``capacity`` slots of one byte each.

    Each request is matched, its missing chunks are stored a few at a time, and its lease ends.
    ``quotas`` says that the policy keeps owners apart. Deterministic if the policy is.
    """
    manager = CacheManager(
        capacity=capacity,
        chunk_tokens=1,
        block_tokens=1,
        policy=policy,
        lease_seconds=1e9,
        write_seconds=1e9,
        quotas=cast("QuotaPolicy", policy) if quotas else None,
        slot_bytes=1,
    )
    manager.grow(capacity)
    found = 0
    for request in requests:
        match = manager.match("replay", request.keys, _no_tails, 0.0, len(request.keys) + 1)
        found += len(match.slots)
        _store(manager, request, len(match.slots))
        if match.lease is not None:
            manager.release(match.lease)
    manager.check()
    return ReplayResult(found, sum(len(request.keys) for request in requests))


def _store(manager: CacheManager, request: ReplayRequest, start: int) -> None:
    keys = request.keys
    for at in range(start, len(keys), _SAVED_AT_ONCE):
        part = range(at, min(at + _SAVED_AT_ONCE, len(keys)))
        writes = [ChunkWrite(keys[d], keys[d - 1] if d else None, d, 1, ()) for d in part]
        reservation = manager.reserve("replay", request.salt, writes, 0.0)
        if reservation.id is None:
            return
        granted = [item for item, answer in enumerate(reservation.items) if answer.slot >= 0]
        manager.complete(reservation.id, granted)


def _no_tails(index: int) -> Sequence[tuple[bytes, int]]:
    del index
    return ()


def optimum(requests: Sequence[ReplayRequest], capacity: int) -> ReplayResult:
    """The most chunks that can be found with ``capacity`` slots, by somebody who knows the future.

    Belady's rule with the freedom to decline: a chunk is kept only if it is needed again sooner than
    one that is there, and the one needed last goes, the deepest among those needed at the same time.
    A chunk is needed whenever one behind it is, so what is kept is always whole beginnings of prompts
    and every chunk that is kept can be found. Without trees this is known to be optimal, and a tree
    only takes choices away; so the number is exact for a cache that stores a chunk when a request
    computes it and at no other time. A policy that cannot decline may be unable to reach it.
    """
    never = len(requests)
    upcoming = [[never] * len(request.keys) for request in requests]
    seen: dict[bytes, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        for depth, key in enumerate(requests[number].keys):
            upcoming[number][depth] = seen.get(key, never)
            seen[key] = number
    kept: dict[bytes, int] = {}
    """When each chunk in the cache is needed next."""
    last: list[tuple[int, int, bytes]] = []
    found = 0
    for number, request in enumerate(requests):
        for depth, key in enumerate(request.keys):
            need = upcoming[number][depth]
            if key in kept:
                found += 1
            elif need == never or not _make_room(kept, last, need, capacity):
                continue
            kept[key] = need
            heapq.heappush(last, (-need, -depth, key))
    return ReplayResult(found, sum(len(request.keys) for request in requests))


def _make_room(kept: dict[bytes, int], last: list[tuple[int, int, bytes]], need: int, capacity: int) -> bool:
    """Whether a chunk that is needed at ``need`` may come in; what is needed last goes for it."""
    if len(kept) < capacity:
        return True
    while last:
        negative, _, key = last[0]
        if kept.get(key) != -negative:
            heapq.heappop(last)  # it was used meanwhile, or went
        elif -negative <= need:
            return False
        else:
            heapq.heappop(last)
            del kept[key]
            return True
    return False
