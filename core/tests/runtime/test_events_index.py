"""An index that is built from events alone agrees with what requests find."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from attrs import define, field

from kvferry.control.keys import MediaItem
from kvferry.control.manager import CacheManager
from kvferry.runtime import (
    CacheEvent,
    ForgetAll,
    KeyChain,
    PinRequest,
    RemovedChunks,
    RequestOptions,
    StoredRun,
)
from kvferry.runtime.events import ChunkContent, grouped
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.keeping import Keeper
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings, key_chains

CHUNK = 16
NEW_CHAIN = key_chains(InstanceSettings())


@define
class Index:
    """What a router keeps: a tree of token ids, whose nodes are known by hashes that it did not make."""

    parents: dict[bytes, bytes | None] = field(factory=dict)
    tokens: dict[bytes, tuple[int, ...]] = field(factory=dict)
    salts: dict[bytes, str] = field(factory=dict)

    def apply(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            match event:
                case StoredRun():
                    parent = event.parent
                    for digest, content in zip(event.digests, event.contents, strict=True):
                        assert parent is None or parent in self.parents, "a child came before its parent"
                        self.parents[digest] = parent
                        self.tokens[digest] = tuple(content.token_ids)
                        self.salts[digest] = event.salt
                        parent = digest
                case RemovedChunks():
                    for digest in event.digests:
                        del self.parents[digest], self.tokens[digest], self.salts[digest]
                        assert digest not in self.parents.values(), "a parent went before its child"
                case ForgetAll():
                    self.parents.clear()
                    self.tokens.clear()
                    self.salts.clear()

    def longest(self, prompt: list[int], salt: str = "") -> int:
        """Tokens of the longest run of full chunks."""
        at: bytes | None = None
        for start in range(0, len(prompt) - CHUNK + 1, CHUNK):
            wanted = tuple(prompt[start : start + CHUNK])
            found = [
                digest
                for digest, parent in self.parents.items()
                if parent == at and self.tokens[digest] == wanted and self.salts[digest] == salt
            ]
            if not found:
                return start
            (at,) = found
        return len(prompt) // CHUNK * CHUNK


def open_(open_instance: Any, slots: int = 64, events: int = 1000) -> FakeInstance:
    engine = EngineSettings(prefix_cache=False, step_tokens=200)
    instance = open_instance(InstanceSettings(engine=engine, slots=slots), manager_options={"events": events})
    assert isinstance(instance, FakeInstance)
    return instance


def run(instance: FakeInstance, tokens: list[int], salt: str = "", **options: Any) -> int:
    """Serve a prompt; tokens that were restored."""
    request = instance.engine.add(tokens, salt=salt, options=RequestOptions(**options))
    instance.engine.run()
    instance.settle_saves()
    return sum(request.hits)


def drain(instance: FakeInstance, index: Index) -> None:
    while events := instance.scheduler.take_events():
        index.apply(events)


def probe(instance: FakeInstance, index: Index, tokens: list[int], salt: str = "") -> None:
    """What the index promises is what a request with one more token finds, but for a tail."""
    drain(instance, index)
    promised = index.longest(tokens, salt)
    got = run(instance, [*tokens, 99_999], salt, store=False)
    assert got // CHUNK * CHUNK == promised


def test_a_chunk_stored_between_holes_has_its_true_parent(open_instance: Any) -> None:
    """Chunks 0 and 2 were there before; the request then stores 1 and 3."""
    instance, index = open_(open_instance), Index()
    tokens = list(range(4 * CHUNK))
    chain = NEW_CHAIN("", None)
    chain.extend(tokens)
    run(instance, tokens)
    drain(instance, index)
    assert index.longest(tokens) == 4 * CHUNK
    with instance.scheduler._lock:  # no other road drops a single chunk
        instance.manager.drop([chain.keys[1]])
    run(instance, tokens[: 2 * CHUNK])
    run(instance, tokens)
    drain(instance, index)
    assert [index.parents[key] for key in chain.keys] == [None, *chain.keys[:-1]]
    assert index.longest(tokens) == 4 * CHUNK


def test_an_index_follows_stores_evictions_and_clears(open_instance: Any) -> None:
    chance = random.Random(3)
    instance, index = open_(open_instance, slots=12), Index()
    texts = [[seed * 1000 + at for at in range(6 * CHUNK)] for seed in range(4)]
    for _ in range(60):
        text = chance.choice(texts)[: chance.randrange(1, 6 * CHUNK)]
        salt = chance.choice(["", "", "tenant"])
        what = chance.randrange(10)
        if what == 0:
            instance.scheduler.clear()
        elif what < 6:
            run(instance, text, salt)
        else:
            probe(instance, index, text, salt)
    for text in texts:
        for salt in ("", "tenant"):
            probe(instance, index, text, salt)
    instance.settle()
    instance.check_idle()


def test_after_facts_were_lost_an_index_believes_in_nothing_that_is_gone_and_learns_by_use(
    open_instance: Any,
) -> None:
    instance, index = open_(open_instance, slots=24, events=5), Index()
    texts = [[seed * 1000 + at for at in range(4 * CHUNK)] for seed in range(5)]
    for text in texts:
        run(instance, text)
    drain(instance, index)
    assert instance.manager.events_behind
    for text in texts:
        assert index.longest(text) <= 4 * CHUNK
        run(instance, [*text, 7], store=False)
        drain(instance, index)
        assert index.longest(text) == 4 * CHUNK
    assert not instance.manager.events_behind


def test_nothing_is_recorded_unless_somebody_listens(open_instance: Any) -> None:
    instance = open_(open_instance, events=0)
    run(instance, list(range(3 * CHUNK)))
    assert instance.scheduler.take_events() == []
    assert not instance.manager.events_behind


def test_a_step_takes_a_bounded_part(open_instance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.runtime.keeping.FACTS_PER_STEP", 2)
    instance, index = open_(open_instance), Index()
    tokens = list(range(5 * CHUNK))
    run(instance, tokens)
    parts = []
    while events := instance.scheduler.take_events():
        index.apply(events)
        parts.append(len(index.parents))
    assert parts == [2, 4, 5]


def test_neighbours_of_one_chain_are_one_event_and_media_keep_their_place() -> None:
    chain = NEW_CHAIN("", None)
    item = MediaItem(identifier="cat", start=CHUNK - 2, length=5)
    chain.extend(list(range(3 * CHUNK)), media=[item])
    assert ChunkContent.of(chain, 1).token_ids == list(range(CHUNK, 2 * CHUNK))
    assert [len(ChunkContent.of(chain, chunk).media) for chunk in range(3)] == [1, 1, 0]
    assert grouped([]) == []


def test_a_request_pins_what_it_hits_and_what_it_stores(open_instance: Any) -> None:
    instance = open_(open_instance, slots=16)
    tokens = list(range(3 * CHUNK))
    run(instance, tokens[: 2 * CHUNK])
    run(instance, tokens, pin=PinRequest("mine", 600.0))
    assert instance.manager.stats().pinned == 3
    for seed in range(1, 12):
        run(instance, [seed * 1000 + at for at in range(3 * CHUNK)])
    assert run(instance, [*tokens, 5], store=False) == 3 * CHUNK
    run(instance, [*tokens, 5], store=False, pin=PinRequest("reader", 600.0))
    assert {pin.name: pin.chunks for pin in instance.manager.pins()} == {"mine": 3, "reader": 3}
    instance.manager.unpin("mine")
    instance.manager.unpin("reader")
    instance.scheduler.run_timers()
    assert instance.manager.stats().pinned == 0
    instance.settle()
    instance.check_idle()


def test_a_requests_time_to_live_ends_what_it_stored(open_instance: Any) -> None:
    instance = open_(open_instance)
    tokens = list(range(3 * CHUNK))
    run(instance, tokens, ttl=1e-6)
    run(instance, [1000 + token for token in tokens], ttl=600.0)
    assert run(instance, [*tokens, 5], store=False) == 0
    assert run(instance, [1000 + token for token in [*tokens, 5]], store=False) == 3 * CHUNK
    instance.settle()
    instance.check_idle()


def test_requests_that_ask_for_nothing_never_wait_for_the_lock_once_more() -> None:
    manager = object.__new__(CacheManager)
    lock = FairLock()
    with lock:  # whoever took it again would wait for ever
        keeper = Keeper(manager, lock, lambda: 0.0, events=False)
        assert keeper.take_events() == []
        keeper.matched(_state(NEW_CHAIN("", None)), 3)


def _state(chain: KeyChain) -> Any:
    from kvferry.runtime import RequestState

    return RequestState(id="r", tokens=[], prompt_tokens=0, chain=chain, salt="", options=RequestOptions())
