"""Two instances that differ, over real sockets: each is refused, and the one that asked says why, once."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from attrs import define, evolve, field

from kvferry.api import (
    Answer,
    Candidate,
    PeerAsk,
    PeerCard,
    PeerId,
    RankCard,
    Refusal,
    Refused,
    ServableChanges,
)
from kvferry_sharing_p2p.network.endpoint import Endpoint
from kvferry_sharing_p2p.peers.carrier import CarrierSettings, PeerNetworkCarrier

PATIENCE = 20.0


@define
class Desk:
    """Has nothing to lend."""

    def ask(self, peer: PeerId, ask: PeerAsk) -> Answer | None:
        return Refused(ask.number, Refusal.NOTHING)

    def renew(self, peer: PeerId, number: int) -> float:
        return 0.0

    def done(self, peer: PeerId, number: int) -> None:
        pass


@define
class Host:
    """Remembers what became of peers."""

    desk: Desk = field(factory=Desk)
    parted: list[tuple[PeerId, str]] = field(factory=list)
    agreed_with: list[PeerCard] = field(factory=list)

    def take_servable(self, limit: int) -> ServableChanges:
        return ServableChanges()

    def walk_servable(self, cursor: int, limit: int) -> tuple[list[bytes], int | None]:
        return [], None

    def found(self, quest: int, candidates: Sequence[Candidate]) -> None:
        pass

    def agreed(self, card: PeerCard) -> None:
        self.agreed_with.append(card)

    def lost(self, peer: PeerId, reason: str) -> None:
        self.parted.append((peer, reason))

    def answered(self, peer: PeerId, answer: Answer) -> None:
        pass

    def renewed(self, peer: PeerId, number: int, turn: int, seconds: float) -> None:
        pass


def card(name: str, **facts: object) -> PeerCard:
    base = PeerCard(
        id=PeerId(name, os.urandom(16)),
        namespace=bytes(32),
        chunk_tokens=256,
        block_tokens=128,
        channel="tcp",
        ranks=(RankCard(shard=b"a", slot_bytes=64, export=b"x"),),
    )
    return evolve(base, **facts)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@define
class Sides:
    stack: ExitStack

    def open(self, its: PeerCard) -> tuple[PeerNetworkCarrier, Host, bytes]:
        listen = Endpoint("127.0.0.1", free_port())
        # Nobody listens at the controller's address, and nobody is asked there.
        settings = CarrierSettings(listen=listen, controller=Endpoint("127.0.0.1", free_port()))
        carrier, host = PeerNetworkCarrier(settings, clock=time.monotonic, random=os.urandom), Host()
        carrier.open(host, its)
        self.stack.callback(lambda: carrier.close(time.monotonic() + PATIENCE))
        return carrier, host, listen.url.encode()


@pytest.fixture
def sides() -> Iterator[Sides]:
    with ExitStack() as stack:
        yield Sides(stack)


def greet(carrier: PeerNetworkCarrier, host: Host, peer: PeerId, address: bytes) -> None:
    before = len(host.parted) + len(host.agreed_with)
    carrier.greet(peer, address)
    end = time.monotonic() + PATIENCE
    while len(host.parted) + len(host.agreed_with) == before:
        assert time.monotonic() < end, "nothing became of it"
        time.sleep(0.005)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_who_is_refused_logs_the_rule_once(sides: Sides, caplog: pytest.LogCaptureFixture) -> None:
    near, host, _ = sides.open(card("near"))
    theirs = card("far", chunk_tokens=512)
    _, their_host, address = sides.open(theirs)
    for _ in range(2):
        greet(near, host, theirs.id, address)
    assert [peer for peer, _ in host.parted] == [theirs.id] * 2
    assert all(reason.startswith("P2P023: ") for _, reason in host.parted)
    (said,) = warnings(caplog)
    assert "far" in said
    assert "P2P023: the instances cut prompts into chunks of 256 and 512 tokens" in said
    assert not host.agreed_with
    assert not their_host.agreed_with


def test_an_earlier_life_is_refused_without_a_word_in_the_log(
    sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    near, host, _ = sides.open(card("near"))
    _, _, address = sides.open(card("far"))
    greet(near, host, PeerId("far", os.urandom(16)), address)
    ((_, reason),) = host.parted
    assert reason.startswith("P2P021: ")
    assert warnings(caplog) == []


def test_who_is_alike_is_agreed_with(sides: Sides) -> None:
    near, host, _ = sides.open(card("near"))
    theirs = card("far")
    _, _, address = sides.open(theirs)
    greet(near, host, theirs.id, address)
    assert host.agreed_with == [theirs]
    assert host.parted == []
