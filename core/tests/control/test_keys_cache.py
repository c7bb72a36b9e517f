"""Only new tokens are hashed, within one request and across the turns of a conversation."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.api import GroupGeometry, KVGeometry
from kvferry.control.chain_cache import ChainCache
from kvferry.control.identity import SHA256, ChunkHash, LoRAIdentity, Namespace
from kvferry.control.keys import KeyChain, MediaItem

CHUNK = 16
CHUNK_MESSAGE = 8 + 32 + 8 + 4 * CHUNK  # mark, parent, head, tokens


class CountingHash:
    """SHA-256 that remembers how long its messages were."""

    def __init__(self) -> None:
        self.messages: list[int] = []

    def digest(self, message: bytes) -> bytes:
        self.messages.append(len(message))
        return SHA256.digest(message)


class Scheduler:
    """What the requests of one scheduler share."""

    def __init__(self, capacity_bytes: int) -> None:
        self.counter = CountingHash()
        self.cache = ChainCache(capacity_bytes)
        group = GroupGeometry(kind="full", layers=1, kv_heads=1, head_size=8, dtype="bfloat16")
        self.namespace = Namespace(
            model="m",
            revision="r",
            geometry=KVGeometry(groups=(group,), chunk_tokens=CHUNK),
            hash=ChunkHash(name="sha256", digest=self.counter.digest),
        )

    def request(
        self,
        tokens: Sequence[int],
        media: Sequence[MediaItem] = (),
        *,
        salt: str = "",
        lora: LoRAIdentity | None = None,
        cached: bool = True,
    ) -> tuple[list[bytes], int]:
        """Keys of the request, and how many bytes were hashed for its chunks."""
        cache = self.cache if cached else None
        chain = KeyChain(self.namespace, salt=salt, lora=lora, cache=cache)
        self.counter.messages.clear()
        chain.extend(tokens, media=media)
        return chain.keys, sum(self.counter.messages)


def test_a_later_turn_hashes_only_its_new_chunks() -> None:
    scheduler = Scheduler(1 << 20)
    first = list(range(10 * CHUNK + 5))
    keys, hashed = scheduler.request(first)
    assert hashed == 10 * CHUNK_MESSAGE
    later = [*first, *range(5000, 5000 + 3 * CHUNK)]
    later_keys, hashed = scheduler.request(later)
    assert hashed == 3 * CHUNK_MESSAGE
    assert later_keys[:10] == keys
    assert later_keys == scheduler.request(later, cached=False)[0]
    assert scheduler.request(later)[1] == 0


def test_tokens_generated_one_by_one_are_hashed_once_and_known_in_the_next_turn() -> None:
    scheduler = Scheduler(1 << 20)
    chain = KeyChain(scheduler.namespace, salt="", lora=None, cache=scheduler.cache)
    scheduler.counter.messages.clear()
    for token in range(5 * CHUNK):
        chain.extend([token])
    assert scheduler.counter.messages == [CHUNK_MESSAGE] * 5
    keys, hashed = scheduler.request(range(5 * CHUNK))
    assert (keys, hashed) == (chain.keys, 0)


def test_a_branch_shares_the_chunks_before_it() -> None:
    scheduler = Scheduler(1 << 20)
    trunk = list(range(4 * CHUNK))
    scheduler.request([*trunk, *[1] * CHUNK])
    _, hashed = scheduler.request([*trunk, *[2] * CHUNK])
    assert hashed == CHUNK_MESSAGE


small = st.sampled_from(["", "a"])
turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=4),
        small,
        st.none() | st.builds(LoRAIdentity, name=small, version=small),
        st.none() | st.builds(MediaItem, identifier=small, start=st.integers(0, 20), length=st.just(9)),
    ),
    max_size=8,
)


@given(turns, st.sampled_from([0, 900, 1 << 20]))
@settings(max_examples=60)
def test_a_cache_never_changes_a_key(
    many: list[tuple[list[int], str, LoRAIdentity | None, MediaItem | None]], capacity: int
) -> None:
    scheduler = Scheduler(capacity)
    for runs, salt, lora, item in many:
        tokens = [token for token in runs for _ in range(CHUNK)]
        media = [item] if item is not None and item.end <= len(tokens) else []
        cached, _ = scheduler.request(tokens, media, salt=salt, lora=lora)
        assert cached == scheduler.request(tokens, media, salt=salt, lora=lora, cached=False)[0]


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(0, 4))
def test_the_least_recently_used_links_go_first(uses: list[int], room: int) -> None:
    probe = ChainCache(1 << 20)
    probe.add(b"p", b"c" * 10, b"d")
    cache = ChainCache(room * probe.used_bytes)
    recent: list[int] = []
    for use in uses:
        parent, content = bytes([use]), bytes([use]) * 10
        found = cache.find(parent, content)
        assert found == (bytes([use, 1]) if use in recent else None)
        if found is None:
            cache.add(parent, content, bytes([use, 1]))
        recent = ([other for other in recent if other != use] + [use])[-room:] if room else []
    cache.clear()
    assert cache.used_bytes == 0
    assert cache.find(b"\0", b"\0" * 10) is None


def test_equal_content_under_another_parent_is_another_link() -> None:
    cache = ChainCache(1 << 20)
    cache.add(b"p", b"content", b"one")
    assert cache.find(b"q", b"content") is None
    cache.add(b"q", b"content", b"two")
    assert (cache.find(b"p", b"content"), cache.find(b"q", b"content")) == (b"one", b"two")


def test_a_link_added_twice_is_charged_once() -> None:
    cache = ChainCache(1 << 20)
    cache.add(b"p", b"content", b"one")
    charged = cache.used_bytes
    cache.add(b"p", b"content", b"one")
    assert cache.used_bytes == charged


def test_memory_stays_within_the_capacity() -> None:
    capacity = 1 << 20
    cache = ChainCache(capacity)
    tracemalloc.start()
    try:
        for number in range(4000):
            name = number.to_bytes(32, "big")
            cache.add(name, name * 32, name[::-1])
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache.used_bytes <= capacity
    assert capacity // 2 < allocated <= capacity
