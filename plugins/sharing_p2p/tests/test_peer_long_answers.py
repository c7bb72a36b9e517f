"""An answer about a very long prompt arrives: it is larger than any frame of a directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvferry.api import Answer, Grant, LentChunk, PeerAsk, PeerCard, PeerDesk, PeerId, RankCard
from kvferry.testing.fake_instance import wait_until
from kvferry.testing.sharing import NullPeerDesk, NullPeerHost
from kvferry_sharing_p2p.directory.messages import MAXIMUM_FRAME_BYTES as DIRECTORY_FRAME_BYTES
from kvferry_sharing_p2p.network.endpoint import parse_url
from kvferry_sharing_p2p.peers.carrier import CarrierSettings, PeerNetworkCarrier
from kvferry_sharing_p2p.peers.messages import Codec
from kvferry_sharing_p2p.peers.translation import answer_message

CHUNKS = 30_000
PATIENCE = 20.0
NOBODY = "tcp://127.0.0.1:1"


def grant(number: int) -> Grant:
    digests = [at.to_bytes(32, "big") for at in range(CHUNKS)]
    return Grant(
        number=number,
        chunks=tuple(
            LentChunk(digest=digest, parent=digests[at - 1] if at else None, depth=at, tokens=256)
            for at, digest in enumerate(digests)
        ),
        slots=tuple(range(CHUNKS)),
        tokens=256 * CHUNKS,
        seconds=30.0,
    )


class Desk(NullPeerDesk):
    def ask(self, peer: PeerId, ask: PeerAsk) -> Answer | None:
        return grant(ask.number)


class Host(NullPeerHost):
    def __init__(self) -> None:
        self.known: list[PeerCard] = []
        self.answers: list[Answer] = []
        self.gone: list[str] = []

    @property
    def desk(self) -> PeerDesk:
        return Desk()

    def agreed(self, card: PeerCard) -> None:
        self.known.append(card)

    def lost(self, peer: PeerId, reason: str) -> None:
        self.gone.append(reason)

    def answered(self, peer: PeerId, answer: Answer) -> None:
        self.answers.append(answer)


def card(name: str) -> PeerCard:
    rank = RankCard(shard=b"shard", slot_bytes=4096, export=b"export")
    return PeerCard(
        id=PeerId(name, os.urandom(16)),
        namespace=bytes(32),
        chunk_tokens=256,
        block_tokens=16,
        channel="tcp",
        ranks=(rank,),
    )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_an_answer_larger_than_a_frame_of_a_directory_arrives(stack: ExitStack) -> None:
    frame = Codec().encode(answer_message(grant(1)))
    assert len(frame) > DIRECTORY_FRAME_BYTES

    def opened(name: str, port: int) -> tuple[PeerNetworkCarrier, Host, PeerCard]:
        settings = CarrierSettings(listen=parse_url(f"tcp://127.0.0.1:{port}"), controller=parse_url(NOBODY))
        carrier, host, me = (
            PeerNetworkCarrier(settings, clock=time.monotonic, random=os.urandom),
            Host(),
            card(name),
        )
        carrier.open(host, me)
        stack.callback(lambda: carrier.close(time.monotonic() + PATIENCE))
        return carrier, host, me

    port = free_port()
    _, _, far = opened("far", port)
    near, host, _ = opened("near", 0)
    near.greet(far.id, f"tcp://127.0.0.1:{port}".encode())
    wait_until(lambda: bool(host.known), PATIENCE, "a greeting")
    near.ask(far.id, PeerAsk(number=7, keys=(bytes(32),), limit_tokens=256))
    wait_until(lambda: bool(host.answers or host.gone), PATIENCE, "an answer")
    assert host.gone == []
    assert host.answers == [grant(7)]


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
