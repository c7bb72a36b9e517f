"""Clearing in slices while everybody else goes on."""

from __future__ import annotations

import hashlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.control.clearing import SLICE_CHUNKS
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite

CHUNK = 4


def key(*path: object) -> bytes:
    return hashlib.sha256(repr(path).encode()).digest()


def write(salt: str, path: tuple[int, ...]) -> ChunkWrite:
    """A full chunk whose chain is told by a path in a tree."""
    parent = key(salt, path[:-1]) if len(path) > 1 else None
    return ChunkWrite(key(salt, path), parent, len(path) - 1, CHUNK)


class Tree:
    """A manager with room for everything, and the paths of chunks that may be there."""

    def __init__(self) -> None:
        self.manager = CacheManager(
            capacity=500, chunk_tokens=CHUNK, block_tokens=1, policy=LRU(), lease_seconds=1, write_seconds=1
        )
        self.manager.grow(500)
        self.salts: dict[bytes, str] = {}

    def store(self, salt: str, path: tuple[int, ...], *, finish: bool = True) -> int | None:
        """The number of a write that is not finished, if it was granted."""
        batch = [write(salt, path[: depth + 1]) for depth in range(len(path))]
        self.salts.update({each.digest: salt for each in batch})
        answer = self.manager.reserve("w", salt, batch, 0.0, model=salt)
        granted = [i for i, item in enumerate(answer.items) if item.outcome.value == "granted"]
        if answer.id is not None and finish:
            self.manager.complete(answer.id, granted)
            return None
        return answer.id

    def there(self) -> set[bytes]:
        return {digest for digest in self.salts if self.manager.touch([digest])}


paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
stores = st.tuples(st.sampled_from(["a", "b"]), paths, st.booleans())


@given(
    before=st.lists(stores, max_size=30),
    meanwhile=st.lists(st.lists(stores, max_size=3), max_size=12),
    salt=st.sampled_from(["a", None]),
    chunks=st.integers(1, 5),
    by_model=st.booleans(),
    drop=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_what_was_there_goes_and_nothing_stands_on_it_whatever_is_stored_meanwhile(
    before: list[Any],
    meanwhile: list[list[Any]],
    salt: str | None,
    chunks: int,
    by_model: bool,
    drop: int,
) -> None:
    tree = Tree()
    open_writes = [tree.store(name, path, finish=finish) for name, path, finish in before]
    old = tree.there()
    gone = {digest for digest in old if salt in (None, tree.salts[digest])}
    cursor = tree.manager.clear_in_slices(model=salt) if by_model else tree.manager.clear_in_slices(salt)
    removed_digests: set[bytes] = set()
    steps = iter(meanwhile)
    more = True
    while more:
        done = cursor.removed.chunks
        more = cursor.advance(chunks)
        assert cursor.removed.chunks <= done + chunks
        tree.manager.check()
        removed_digests |= gone - tree.there()
        for name, path, finish in next(steps, []):
            if len(path) == drop:
                tree.manager.drop([key(name, path)])
            else:
                open_writes.append(tree.store(name, path, finish=finish))
        tree.manager.check()
    assert removed_digests == gone
    assert drop or tree.there() >= old - gone
    before_results = tree.there()
    for number in open_writes:
        if number is not None:
            tree.manager.complete(number, ())
    tree.manager.check()
    assert tree.there() == before_results


def test_a_write_under_way_when_it_began_does_not_become_visible() -> None:
    tree = Tree()
    number = tree.store("a", (0, 0), finish=False)
    assert number is not None
    cursor = tree.manager.clear_in_slices("a")
    while cursor.advance():
        pass
    assert cursor.removed.doomed == 2
    assert tree.manager.complete(number, {0, 1}).visible == 0
    assert not tree.there()


def test_no_slice_removes_more_than_it_should_from_one_long_chain() -> None:
    tree = Tree()
    path = (0,) * 400
    tree.store("a", path)
    cursor = tree.manager.clear_in_slices()
    slices = 1
    while cursor.advance():
        assert cursor.removed.chunks <= SLICE_CHUNKS * slices
        left = len(tree.there())
        assert left == len(path) - cursor.removed.chunks
        slices += 1
    assert cursor.removed.removed == len(path)


def test_an_unknown_salt_or_model_clears_nothing() -> None:
    tree = Tree()
    tree.store("a", (0, 1))
    for found in (tree.manager.clear("x"), tree.manager.clear(model="x"), tree.manager.clear(model="")):
        assert found.chunks == 0
    assert len(tree.there()) == 2


def test_a_clear_goes_on_after_somebody_else_removed_what_it_was_at() -> None:
    tree = Tree()
    path = (0,) * 5
    tree.store("a", path)
    cursor = tree.manager.clear_in_slices("a")
    assert cursor.advance(1)
    tree.manager.drop([key("a", path[:2])])
    while cursor.advance(1):
        tree.manager.check()
    assert not tree.there()
