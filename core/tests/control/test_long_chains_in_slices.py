"""However long a chain is, one hold of the lock passes and changes a bounded part of it."""

from __future__ import annotations

import pytest

from kvferry.control.clearing import SLICE_CHUNKS
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite
from kvferry.control.residency import STEPS_AT_ONCE
from kvferry.runtime import PinRequest, RequestOptions, RequestState
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.keeping import PINNED_AT_ONCE, Keeper
from kvferry.testing.fake_instance import InstanceSettings, key_chains

SETTINGS = InstanceSettings()
BLOCK = SETTINGS.engine.block_tokens
CHUNK = SETTINGS.chunk_blocks * BLOCK
CHUNKS = 4 * STEPS_AT_ONCE


def a_manager() -> CacheManager:
    manager = CacheManager(
        capacity=CHUNKS + 8,
        chunk_tokens=CHUNK,
        block_tokens=BLOCK,
        policy=LRU(),
        lease_seconds=60.0,
        write_seconds=60.0,
        max_pinned=1.0,
    )
    manager.grow(CHUNKS + 8)
    return manager


def a_request(options: RequestOptions, chunks: int = CHUNKS) -> RequestState:
    tokens = list(range(chunks * CHUNK + 1))
    chain = key_chains(SETTINGS)("", None)
    chain.extend(tokens)
    return RequestState(
        id="long", tokens=tokens, prompt_tokens=len(tokens), chain=chain, salt="", options=options
    )


def writes_of(state: RequestState) -> list[ChunkWrite]:
    keys = state.chain.keys
    return [ChunkWrite(key, keys[at - 1] if at else None, at, CHUNK) for at, key in enumerate(keys)]


def stored(manager: CacheManager, state: RequestState, chunks: int, ttl: float | None = None) -> None:
    answer = manager.reserve("w", "", writes_of(state)[:chunks], 0.0, ttl=ttl)
    assert answer.id is not None
    manager.complete(answer.id, range(chunks))


class Watch:
    """The most that one hold of the lock did."""

    def __init__(self, lock: FairLock) -> None:
        self.lock = lock
        self.most = self.now = 0

    def __enter__(self) -> None:
        self.lock.__enter__()
        self.now = 0

    def __exit__(self, *exc: object) -> None:
        self.most = max(self.most, self.now)
        self.lock.__exit__(*exc)

    def did(self, count: int = 1) -> None:
        self.now += count


@pytest.mark.parametrize("way", ["clear", "end"])
def test_a_long_chain_is_removed_from_its_far_end_in_slices(way: str) -> None:
    manager, state = a_manager(), a_request(RequestOptions())
    stored(manager, state, CHUNKS, ttl=5.0)
    cursor = manager.clear_in_slices()
    removed: list[int] = []
    more = True
    while more:
        before = manager.stats().resident
        if way == "clear":
            more = cursor.advance()
        else:
            manager.expire(5.0, SLICE_CHUNKS)
            more = manager.next_deadline() <= 5.0
        removed.append(before - manager.stats().resident)
        if len(removed) % 50 == 0:
            manager.check()
    assert sum(removed) == CHUNKS
    assert max(removed) == SLICE_CHUNKS
    # The way to the end takes slices of its own, and leads there once.
    on_the_way = next(number for number, gone in enumerate(removed) if gone)
    assert on_the_way == CHUNKS // STEPS_AT_ONCE - 1
    assert all(removed[on_the_way : on_the_way + CHUNKS // SLICE_CHUNKS])
    manager.check()


def test_without_a_limit_all_that_ended_goes_however_long_its_chain_is() -> None:
    manager, state = a_manager(), a_request(RequestOptions())
    stored(manager, state, CHUNKS, ttl=5.0)
    assert manager.expire(5.0).ended.removed == CHUNKS
    manager.check()


def test_a_chain_whose_pin_ended_is_pinned_again_in_slices() -> None:
    manager = a_manager()
    state = a_request(RequestOptions(pin=PinRequest("p", 10.0)))
    stored(manager, state, CHUNKS - 1)
    watch = Watch(FairLock())
    keeper = Keeper(manager, watch, lambda: 0.0, events=False)  # type: ignore[arg-type]
    cover = manager._residency.pins.cover

    def counted(pin: object, rows: list[int], *, tail: bool) -> int:
        watch.did(len(rows))
        return cover(pin, rows, tail=tail)  # type: ignore[arg-type]

    manager._residency.pins.cover = counted  # type: ignore[method-assign, assignment]
    last = writes_of(state)[-1:]
    for _ in range(2):  # the second time nothing is left to do
        with watch:
            answer = keeper.reserve(state, last, 0.0)
        keeper.reserved(state, last, answer)
    assert manager.stats().pinned == CHUNKS
    assert 0 < watch.most <= PINNED_AT_ONCE


def test_a_chain_is_let_stay_longer_in_slices() -> None:
    manager = a_manager()
    state = a_request(RequestOptions(ttl=50.0))
    stored(manager, state, CHUNKS - 1, ttl=5.0)
    watch = Watch(FairLock())
    keeper = Keeper(manager, watch, lambda: 1.0, events=False)  # type: ignore[arg-type]
    set_end = manager._residency.deadlines.set

    def counted(row: int, end: float) -> None:
        watch.did()
        set_end(row, end)

    manager._residency.deadlines.set = counted  # type: ignore[method-assign]
    last = writes_of(state)[-1:]
    keeper.prepare(state, CHUNKS - 1, 1.0)
    with watch:
        assert keeper.reserve(state, last, 1.0).id is not None
    assert 0 < watch.most <= PINNED_AT_ONCE + 1
    ends = {manager._residency.deadlines.end(row) for row in range(CHUNKS)}
    assert ends == {51.0}


def test_what_has_ended_is_not_brought_back_by_what_comes_behind_it() -> None:
    manager = a_manager()
    state = a_request(RequestOptions(ttl=50.0), chunks=4)
    stored(manager, state, 3, ttl=5.0)
    Keeper(manager, FairLock(), lambda: 6.0, events=False).prepare(state, 3, 6.0)
    assert manager.reserve("w", "", writes_of(state)[3:], 6.0).id is None
    assert manager.match("r", state.chain.keys, lambda index: [], 6.0, 4 * CHUNK).tokens == 0
