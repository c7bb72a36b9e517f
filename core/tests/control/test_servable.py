"""Whoever follows what can be served knows exactly that, however much happens in between."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from core.tests.control.test_serving_peers import key, make_manager, store, writes
from kvferry.control.entries import State
from kvferry.control.manager import CacheManager
from kvferry.control.servable import ROWS_AT_ONCE

actions = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sampled_from("pqrs"), st.integers(1, 6)),
        st.tuples(st.just("tail"), st.sampled_from("pqrs"), st.integers(1, 4)),
        st.tuples(st.just("drop"), st.sampled_from("pqrs"), st.integers(0, 4)),
        st.tuples(st.just("clear"), st.just(""), st.just(0)),
        st.tuples(st.just("follow"), st.just(""), st.integers(1, 4)),
    ),
    max_size=40,
)


class Follower:
    """Knows what it was told, and walks when something was lost."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.known: set[bytes] = set()

    def follow(self, limit: int) -> None:
        changes = self.manager.copying.take_servable(limit)
        if changes.lost:
            self.known = set(walk(self.manager, limit))
        assert not set(changes.added) & set(changes.removed)
        self.known |= set(changes.added)
        self.known -= set(changes.removed)

    def catch_up(self) -> None:
        while self.manager.copying.has_servable:
            self.follow(3)


def walk(manager: CacheManager, limit: int) -> list[bytes]:
    found: list[bytes] = []
    cursor: int | None = 0
    while cursor is not None:
        part, cursor = manager.copying.walk_servable(cursor, limit)
        assert len(part) <= limit
        found += part
    assert len(found) == len(set(found))
    return found


def full_chunks(manager: CacheManager) -> set[bytes]:
    entries = manager._residency.entries
    rows = [row for row in range(entries.rows) if entries.state.view[row] == State.VISIBLE]
    return {entries.digests.digest(row) for row in rows if entries.is_full(row)}


@settings(max_examples=150, deadline=None)
@given(actions=actions, limit=st.sampled_from([2, 5, 1000]))
def test_a_follower_knows_what_can_be_served(actions: list[tuple[str, str, int]], limit: int) -> None:
    manager = make_manager()
    store(manager, writes("before", 2))
    manager.copying.watch_servable(limit)
    follower = Follower(manager)
    follower.known = set(walk(manager, 3))
    for what, name, number in actions:
        match what:
            case "store":
                store(manager, writes(name, number))
            case "tail":
                store(manager, writes(name, number, tail=True))
            case "drop":
                manager.drop([key(name, number)])
            case "clear":
                manager.clear()
            case "follow":
                follower.follow(number)
    follower.catch_up()
    assert follower.known == full_chunks(manager)


def test_a_walk_over_many_rows_tells_of_what_stays_whatever_comes_and_goes() -> None:
    manager = make_manager(3 * ROWS_AT_ONCE)
    for number in range(ROWS_AT_ONCE):
        store(manager, writes(f"text {number}", 2))
    stays = {key(f"text {number}", 0) for number in range(0, ROWS_AT_ONCE, 2)}
    found: list[bytes] = []
    cursor: int | None = 0
    step = 1
    while cursor is not None:
        part, cursor = manager.copying.walk_servable(cursor, 300)
        found += part
        manager.drop([key(f"text {step}", 0)])
        store(manager, writes(f"new {step}", 1))
        step += 2
    assert stays <= set(found)
    assert len(found) == len(set(found))


def test_nothing_is_kept_before_somebody_follows() -> None:
    manager = make_manager()
    store(manager, writes("p", 3))
    assert not manager.copying.has_servable
    assert manager.copying.take_servable(10).added == ()
