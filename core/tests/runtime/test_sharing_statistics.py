"""What an operator is told of other instances, beside what happened."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.api import ChunkKey, Grant, PeerAsk, PeerId
from kvferry.data.questions import QUESTIONS_VERSION
from kvferry.runtime import SharingState, SharingStatistics
from kvferry.runtime.instances import Card
from kvferry.runtime.sharing_statistics import BORROW_COUNTS, LEND_COUNTS
from kvferry.testing.fake_engine import EngineSettings, FakeRequest
from kvferry.testing.fake_instance import (
    FakeInstance,
    InstanceSettings,
    LowerFake,
    SharingFake,
    open_fake_instance,
    wait_until,
)
from kvferry.testing.keyed_backends import Record, ShelfBackend
from kvferry.testing.memory_carrier import MemoryCarrier, PeerNetwork
from kvferry.testing.memory_channel import MemoryNetwork, make_memory_channels

CHUNK = 16
OpenPeer = Callable[..., FakeInstance]


def prompt(number: int, chunks: int = 4) -> list[int]:
    """One token longer than its chunks, so that all of them can be hit."""
    return [1000 * number + token for token in range(chunks * CHUNK + 1)]


@pytest.fixture
def network() -> PeerNetwork:
    return PeerNetwork()


@pytest.fixture
def open_peer(folder: Path, network: PeerNetwork) -> Iterator[OpenPeer]:
    """Opens an instance that shares; settings are those of borrowing. ``ssd`` has it a second tier."""
    channels = MemoryNetwork()
    with ExitStack() as stack:

        def open_(name: str, *, ssd: bool = False, **settings: Any) -> FakeInstance:
            shelf: dict[ChunkKey, Record] = {}
            sharing = SharingFake(
                id=PeerId(name, os.urandom(16)),
                carrier=MemoryCarrier(network),
                make_channel=make_memory_channels(channels),
                settings=settings,
            )
            made = InstanceSettings(
                engine=EngineSettings(prefix_cache=False),
                engine_id=name,
                sharing=sharing,
                lower=(LowerFake(make_backend=lambda _rank: ShelfBackend(shelf, 1 << 30), name="ssd"),) * ssd,
            )
            card = Card(
                name=name,
                engine_id=name,
                pid=os.getpid(),
                version="1",
                questions=QUESTIONS_VERSION,
                tiers=("memory",),
            )
            opened = open_fake_instance(folder, made, card=msgspec.json.encode(card).decode())
            instance = stack.enter_context(opened)
            wait_until(lambda: sharing.id in network.members, 10.0, f"{name} never shared anything")
            return instance

        yield open_


def serve(instance: FakeInstance, tokens: list[int]) -> int:
    """How many tokens it hit."""
    request = instance.engine.add(tokens)
    instance.engine.run()
    instance.settle_told()
    return sum(request.hits)


def told(instance: FakeInstance) -> SharingStatistics:
    """Once nothing is held for anybody any more."""

    def at_rest() -> bool:
        statistics = instance.scheduler.sharing_statistics()
        assert statistics is not None
        return statistics.loans == statistics.leases == 0

    wait_until(at_rest, 10.0, "loans or leases that stayed")
    statistics = instance.scheduler.sharing_statistics()
    assert statistics is not None
    assert (set(statistics.borrowed), set(statistics.lent)) == (set(BORROW_COUNTS), set(LEND_COUNTS))
    return statistics


def risen(instance: FakeInstance) -> int:
    statistics = instance.scheduler.lower_statistics()
    assert statistics is not None
    return statistics.risen_tokens


def happened(counts: Any) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def test_live_status_shows_what_was_borrowed_and_what_is_lent(
    open_peer: OpenPeer, live: Callable[..., Any]
) -> None:
    near, far = open_peer("near"), open_peer("far")
    serve(far, prompt(1))
    assert serve(near, prompt(1)) == 4 * CHUNK
    for instance in (near, far):
        told(instance)
    borrower, lender = live("status", "near")["sharing"], live("status", "far")["sharing"]
    (peer,) = borrower["peers"]
    assert (peer["peer"], peer["standing"], peer["reason"]) == ("far", "agreed", "")
    assert peer["epoch"] == lender["epoch"]
    assert (borrower["instance"], borrower["channel"], borrower["state"]) == ("near", "fake", "open")
    borrowed = {"tokens": 4 * CHUNK, "quests": 1, "granted": 1, "chunks": 4, "fetched": 4}
    assert happened(borrower["borrowed"]) == borrowed
    assert happened(borrower["lent"]) == {}
    assert happened(lender["lent"]) == {"granted": 1, "chunks": 4, "done": 1}
    assert (lender["lent"]["leases"], lender["lent"]["slots"]) == (0, 0)
    assert lender["peers"] == []
    text = live("status", "near", text=True)
    assert "shared with other instances as near over fake: open\n" in text
    assert f"far   {peer['epoch'][:8]}  agreed    -" in text
    assert "\nborrowed from peers\n" in text
    assert "\nlent to peers\n" in text


def test_live_status_of_an_instance_that_shares_nothing_has_no_word_of_it(
    open_instance: Any, live: Callable[..., Any]
) -> None:
    card = Card(
        name="a", engine_id="fake", pid=os.getpid(), version="1", questions=QUESTIONS_VERSION, tiers=()
    )
    open_instance(InstanceSettings(), card=msgspec.json.encode(card).decode())
    assert live("status")["sharing"] is None
    assert "peer" not in live("status", text=True)


def test_what_is_lent_now_is_shown_until_it_is_given_back(
    open_peer: OpenPeer, live: Callable[..., Any]
) -> None:
    far = open_peer("far")
    serve(far, prompt(1))
    chain = far.new_chain("", None)
    chain.extend(prompt(1))
    sharing = far.scheduler.sharing
    assert sharing is not None
    somebody = PeerId("somebody", bytes(16))
    ask = PeerAsk(number=1, keys=tuple(chain.keys), skip=1, limit_tokens=4 * CHUNK)
    assert isinstance(sharing.desk.ask(somebody, ask), Grant)
    lent = live("status", "far")["sharing"]["lent"]
    assert happened(lent) == {"leases": 1, "slots": 3, "granted": 1, "chunks": 3}
    sharing.desk.done(somebody, 1)
    lent = live("status", "far")["sharing"]["lent"]
    assert happened(lent) == {"granted": 1, "chunks": 3, "done": 1}


def test_a_peer_that_does_not_answer_is_shown_with_the_reason(
    open_peer: OpenPeer, network: PeerNetwork, live: Callable[..., Any]
) -> None:
    near, far = open_peer("near", load_deadline=0.2, pause_seconds=60.0), open_peer("far")
    serve(far, prompt(1))
    network.cut.update(each for each in network.members if each.instance == "far")
    assert serve(near, prompt(1)) == 0
    (peer,) = told(near).peers
    assert (peer.id.instance, peer.standing) == ("far", "paused")
    assert peer.reason
    assert f"paused    {peer.reason}" in live("status", "near", text=True)
    assert told(near).borrowed["paused"] == 1
    network.cut.clear()


def test_what_was_kept_is_borrowed_once(open_peer: OpenPeer) -> None:
    near, far = open_peer("near"), open_peer("far")
    serve(far, prompt(1))
    assert [serve(near, prompt(1)) for _ in range(3)] == [4 * CHUNK] * 3
    assert told(near).borrowed_tokens == 4 * CHUNK
    assert risen(near) == 0


def test_what_goes_into_the_engines_blocks_at_once_is_borrowed_too(open_peer: OpenPeer) -> None:
    near, far = open_peer("near", delay=True), open_peer("far")
    serve(far, prompt(1))
    assert [serve(near, prompt(1)) for _ in range(2)] == [4 * CHUNK] * 2
    # It is kept, so the second time it is found here.
    assert told(near).borrowed_tokens == 4 * CHUNK
    assert (told(near).borrowed["granted"], told(near).borrowed["fetched"]) == (1, 4)
    assert risen(near) == 0


def test_what_is_lent_to_a_request_that_waits_for_room_in_the_engine_is_shown(open_peer: OpenPeer) -> None:
    near, far = open_peer("near", delay=True, load_deadline=30.0), open_peer("far")
    serve(far, prompt(1))
    room = False
    near.engine.admit = lambda request: room
    near.engine.add(prompt(1))

    def held() -> bool:
        near.engine.step()
        statistics = near.scheduler.sharing_statistics()
        return statistics is not None and statistics.loans == 1

    wait_until(held, 10.0, "nothing was lent")
    room = True
    near.engine.run()
    near.settle_lower()
    assert told(near).borrowed_tokens == 4 * CHUNK


def test_of_a_prefix_that_was_borrowed_in_part_before_only_the_rest_is_counted(open_peer: OpenPeer) -> None:
    near, far = open_peer("near"), open_peer("far")
    serve(far, prompt(1, 6))
    assert [serve(near, prompt(1, chunks)) for chunks in (2, 6)] == [2 * CHUNK, 6 * CHUNK]
    assert told(near).borrowed_tokens == 6 * CHUNK


def test_all_requests_that_waited_for_it_borrowed_it(open_peer: OpenPeer) -> None:
    near, far = open_peer("near"), open_peer("far")
    serve(far, prompt(1))
    requests = [near.engine.add(prompt(1)) for _ in range(3)]
    near.engine.run()
    assert [sum(request.hits) for request in requests] == [4 * CHUNK] * 3
    assert told(near).borrowed_tokens == 12 * CHUNK
    assert told(near).borrowed["fetched"] == 4


def test_tokens_of_a_lower_tier_and_of_peers_are_told_apart(open_peer: OpenPeer) -> None:
    near, far = open_peer("near", ssd=True), open_peer("far")
    serve(near, prompt(1, 2))
    serve(far, prompt(1, 6))
    with near.scheduler._lock:
        near.manager.clear()
    assert serve(near, prompt(1, 6)) == 6 * CHUNK
    assert (risen(near), told(near).borrowed_tokens) == (2 * CHUNK, 4 * CHUNK)


def test_what_another_request_here_has_computed_meanwhile_is_not_borrowed(open_peer: OpenPeer) -> None:
    near, far = open_peer("near"), open_peer("far")
    serve(far, prompt(2))
    first, second = (near.engine.add(prompt(1)) for _ in range(2))
    # Both look for it at others. While the second waits for room in the engine the first is stored.
    stored = False

    def admit(request: FakeRequest) -> bool:
        nonlocal stored
        room = request is first or stored
        stored = near.manager.stats().resident >= 4  # it asks once more before it is let in
        return room

    near.engine.admit = admit
    near.engine.run()
    near.settle_lower()
    assert (sum(first.hits), sum(second.hits)) == (0, 4 * CHUNK)
    assert (told(near).borrowed_tokens, risen(near)) == (0, 0)


def test_an_engine_whose_cache_was_reset_says_that_it_shares_nothing(
    open_peer: OpenPeer, live: Callable[..., Any]
) -> None:
    near = open_peer("near")
    assert told(near).state is SharingState.OPEN
    near.scheduler.clear()
    assert told(near).state is SharingState.RETIRED
    assert live("status", "near")["sharing"]["state"] == "retired"
