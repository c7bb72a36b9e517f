"""A light peer of a real engine: it asks for one prompt's chunks again and again, and may read them.

Started by :mod:`tests.bench.p2p_serving` as ``python -m tests.bench.peer_asker URL INSTANCE TOKENS CORE``:
the directory, the engine's instance, how many tokens the prompt has, and the core on which all of this runs.
It has a carrier, the local channel and memory of its own, and no engine. It tells ``ready``, then reads
commands from standard input: ``ask`` and ``read`` begin, ``stop`` ends and tells in one line of JSON what
came of it.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from kvferry.api import (
    Answer,
    Candidate,
    ChannelContext,
    Connection,
    Grant,
    GroupGeometry,
    KVGeometry,
    PeerAsk,
    PeerCard,
    PeerDesk,
    PeerId,
    RankCard,
    Refusal,
    Refused,
    RemoteOp,
    ServableChanges,
    Span,
)
from kvferry.control.identity import Namespace
from kvferry.control.keys import KeyChain
from kvferry.data.engine_side import EngineGroup, EngineSide, PagePlane
from kvferry.data.mapping import create_region
from kvferry_sharing_p2p.network.endpoint import Endpoint, parse_url
from kvferry_sharing_p2p.peers.carrier import CarrierSettings, PeerNetworkCarrier
from kvferry_transport_local.channel import LocalChannel
from kvferry_transport_local.options import LocalOptions
from tests.demo.prompts import BLOCK_TOKENS, CHUNK_TOKENS, random_tokens
from tests.models import DEMO

NAME = "asker"
MODEL = "bench"
"""What the engine's configuration calls its model."""
SEED = 9000
"""Of the prompt that is asked for."""
SECONDS = 30.0
PAUSE_SECONDS = 0.005
"""Between two asks, where nothing is read."""
SLOT_BYTES = CHUNK_TOKENS * DEMO.kv_bytes_per_token
MEMORY = "memory"


class _EmptyDesk:
    """Has nothing to lend."""

    def ask(self, peer: PeerId, ask: PeerAsk) -> Answer | None:
        return Refused(ask.number, Refusal.NOTHING)

    def renew(self, peer: PeerId, number: int) -> float:
        return 0.0

    def done(self, peer: PeerId, number: int) -> None:
        pass


@define(eq=False)
class _Host:
    """Takes what the carrier says, each kind in a queue of its own."""

    candidates: queue.SimpleQueue[Sequence[Candidate]] = field(factory=queue.SimpleQueue)
    greetings: queue.SimpleQueue[PeerCard | str] = field(factory=queue.SimpleQueue)
    answers: queue.SimpleQueue[Answer] = field(factory=queue.SimpleQueue)

    @property
    def desk(self) -> PeerDesk:
        return _EmptyDesk()

    def take_servable(self, limit: int) -> ServableChanges:
        return ServableChanges()

    def walk_servable(self, cursor: int, limit: int) -> tuple[list[bytes], int | None]:
        return [], None

    def found(self, quest: int, candidates: Sequence[Candidate]) -> None:
        self.candidates.put(candidates)

    def agreed(self, card: PeerCard) -> None:
        self.greetings.put(card)

    def lost(self, peer: PeerId, reason: str) -> None:
        self.greetings.put(reason)

    def answered(self, peer: PeerId, answer: Answer) -> None:
        self.answers.put(answer)

    def renewed(self, peer: PeerId, number: int, turn: int, seconds: float) -> None:
        pass


@define
class _Holder:
    """The engine, once it was met."""

    carrier: PeerNetworkCarrier
    host: _Host
    card: PeerCard
    keys: tuple[bytes, ...]
    last: int = 0

    def ask(self) -> tuple[Grant, float]:
        """What it lends, and the seconds until it said so."""
        self.last += 1
        ask = PeerAsk(number=self.last, keys=self.keys, limit_tokens=len(self.keys) * CHUNK_TOKENS)
        began = time.perf_counter()
        self.carrier.ask(self.card.id, ask)
        answer = self.host.answers.get(timeout=SECONDS)
        seconds = time.perf_counter() - began
        if not isinstance(answer, Grant) or len(answer.chunks) != len(self.keys):
            raise RuntimeError(f"the engine does not lend its chunks: {answer}")
        return answer, seconds

    def done(self) -> None:
        self.carrier.done(self.card.id, self.last)


def _space() -> Namespace:
    group = GroupGeometry(
        kind="full",
        layers=DEMO.layers,
        kv_heads=DEMO.kv_heads,
        head_size=DEMO.head_size,
        dtype="bfloat16",
    )
    geometry = KVGeometry(groups=(group,), chunk_tokens=CHUNK_TOKENS)
    return Namespace(model=MODEL, revision="", geometry=geometry)


def _shard() -> bytes:
    """Of the engine's one rank: what vLLM's CPU backend lays out, K and V of a head side by side."""
    shape = (DEMO.kv_heads, BLOCK_TOKENS, 2 * DEMO.head_size)
    stride = (shape[1] * shape[2], shape[2], 1)
    planes = [
        PagePlane(
            layer=f"model.layers.{layer}.self_attn.attn",
            address=0,
            stride=2 * math.prod(shape),
            page_bytes=2 * math.prod(shape),
            blocks=1,
            form=f"torch.bfloat16 {shape} {stride}",
        )
        for layer in range(DEMO.layers)
    ]
    group = EngineGroup(block_tokens=BLOCK_TOKENS, planes=tuple(planes))
    return EngineSide([group], CHUNK_TOKENS).shard(0, 1)


def _meet(url: str, instance: str, keys: tuple[bytes, ...], export: bytes) -> _Holder:
    """Say hello."""
    host = _Host()
    settings = CarrierSettings(listen=Endpoint("127.0.0.1", 0), controller=parse_url(url))
    carrier = PeerNetworkCarrier(settings, clock=time.monotonic, random=os.urandom)
    carrier.open(host, _card(export))
    candidate = _find(carrier, host, instance, keys)
    carrier.greet(candidate.peer, candidate.address)
    told = host.greetings.get(timeout=SECONDS)
    match told:
        case PeerCard():
            return _Holder(carrier, host, told, keys)
        case reason:
            raise RuntimeError(f"the engine is not like this peer: {reason}")


def _find(carrier: PeerNetworkCarrier, host: _Host, instance: str, keys: tuple[bytes, ...]) -> Candidate:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        carrier.find(1, keys, deadline)
        for candidate in host.candidates.get(timeout=SECONDS):
            if candidate.peer.instance == instance and candidate.chunks == len(keys):
                return candidate
        time.sleep(0.1)
    raise RuntimeError(f"the directory does not know that {instance} has the prompt")


def _card(export: bytes) -> PeerCard:
    return PeerCard(
        id=PeerId(NAME, os.urandom(16)),
        namespace=_space().digest,
        chunk_tokens=CHUNK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        channel="local",
        ranks=(RankCard(shard=_shard(), slot_bytes=SLOT_BYTES, export=export),),
    )


def _read(channel: LocalChannel, connection: Connection, grant: Grant) -> int:
    operations = [
        RemoteOp(Span(MEMORY, at * SLOT_BYTES, SLOT_BYTES), grant.region, slot * SLOT_BYTES)
        for at, slot in enumerate(grant.slots)
    ]
    ticket = channel.read(connection, operations, time.monotonic() + SECONDS)
    if not ticket.wait(SECONDS) or any(result.error for result in ticket.results):
        raise RuntimeError(f"the channel failed: {ticket.results[0].error}")
    return len(operations) * SLOT_BYTES


def _go_on(
    holder: _Holder, read: Callable[[Grant], int] | None, stop: threading.Event, pause: float
) -> dict[str, Any]:
    """Ask, and read if there is something to read with, and wait so many seconds."""
    latencies = []
    moved = 0
    began = time.perf_counter()
    while not stop.is_set():
        grant, seconds = holder.ask()
        latencies.append(1000 * seconds)
        if read is not None:
            moved += read(grant)
        holder.done()
        stop.wait(pause)
    return {"ms": latencies, "bytes": moved, "seconds": time.perf_counter() - began}


def main(url: str, instance: str, tokens: int, core: int) -> None:
    os.sched_setaffinity(0, {core})
    chain = KeyChain(_space(), salt="", lora=None)
    chain.extend(random_tokens(SEED, tokens))
    keys = tuple(chain.keys)
    with create_region(MEMORY, len(keys) * SLOT_BYTES) as memory:
        channel = LocalChannel(LocalOptions(threads=1))
        channel.open(ChannelContext(name="local", instance=NAME, epoch=os.urandom(16)))
        channel.register(memory.region)
        holder = _meet(url, instance, keys, channel.export())
        connection = channel.connect(holder.card.ranks[0].export, time.monotonic() + SECONDS)
        grant, _ = holder.ask()
        _read(channel, connection, grant)
        holder.done()
        print("ready", flush=True)
        for command in sys.stdin:
            stop = threading.Event()
            outcome: list[dict[str, Any]] = []
            way, *rate = command.split()
            pause = 1 / float(rate[0]) if rate else PAUSE_SECONDS if way == "ask" else 0.0
            read = (lambda grant: _read(channel, connection, grant)) if way == "read" else None
            thread = threading.Thread(
                target=lambda: outcome.append(_go_on(holder, read, stop, pause))  # noqa: B023
            )
            thread.start()
            sys.stdin.readline()
            stop.set()
            thread.join()
            print(json.dumps(outcome[0]), flush=True)
        holder.carrier.close(time.monotonic() + SECONDS)
        channel.close(time.monotonic() + SECONDS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
