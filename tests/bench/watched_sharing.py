"""Carrier and channel of an instance that note when something passes them, for benches of lookups."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from attrs import define, field

from kvferry.api import (
    Answer,
    Candidate,
    Channel,
    Connection,
    PeerAsk,
    PeerCard,
    PeerCarrier,
    PeerDesk,
    PeerHost,
    PeerId,
    RemoteOp,
    ServableChanges,
    Ticket,
    TransferStatus,
)
from kvferry.testing.channels import ForwardingChannel


@define(eq=False)
class Marks:
    """When each thing happened first since :meth:`begin`. Threads: any."""

    _times: dict[str, float] = field(factory=dict)
    _changed: threading.Condition = field(factory=threading.Condition)

    def begin(self) -> None:
        with self._changed:
            self._times = {"begin": time.perf_counter()}

    def note(self, name: str) -> None:
        now = time.perf_counter()
        with self._changed:
            self._times.setdefault(name, now)
            self._changed.notify_all()

    def wait(self, name: str, seconds: float) -> None:
        """Until it has happened. Raises ``TimeoutError``."""
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._times, seconds):
                raise TimeoutError(f"no {name!r} in {seconds:g} s, but {list(self._times)}")

    def between(self, first: str, last: str) -> float:
        """Seconds."""
        with self._changed:
            return self._times[last] - self._times[first]


class WatchedChannel(ForwardingChannel):
    """Marks ``read``, when the first bytes are asked for."""

    def __init__(self, inner: Channel, marks: Marks) -> None:
        super().__init__(inner)
        self._marks = marks

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        self._marks.note("read")
        return super().read(connection, operations, deadline)


class WatchedCarrier:
    """Marks ``find`` and ``ask``, when core has them sent, ``found`` and ``answered``, when answers come, and
    ``decided``, when core has taken in what the directory said."""

    def __init__(self, inner: PeerCarrier, marks: Marks) -> None:
        self._inner = inner
        self._marks = marks

    def open(self, host: PeerHost, card: PeerCard) -> None:
        self._inner.open(_WatchedHost(host, self._marks), card)

    def served(self) -> None:
        self._inner.served()

    def find(self, quest: int, digests: Sequence[bytes], deadline: float) -> None:
        self._marks.note("find")
        self._inner.find(quest, digests, deadline)

    def greet(self, peer: PeerId, address: bytes) -> None:
        self._inner.greet(peer, address)

    def ask(self, peer: PeerId, ask: PeerAsk) -> None:
        self._marks.note("ask")
        self._inner.ask(peer, ask)

    def renew(self, peer: PeerId, number: int, turn: int) -> None:
        self._inner.renew(peer, number, turn)

    def done(self, peer: PeerId, number: int) -> None:
        self._inner.done(peer, number)

    def answer(self, peer: PeerId, answer: Answer) -> None:
        self._inner.answer(peer, answer)

    def close(self, deadline: float) -> None:
        self._inner.close(deadline)


class _WatchedHost:
    def __init__(self, inner: PeerHost, marks: Marks) -> None:
        self._inner = inner
        self._marks = marks

    @property
    def desk(self) -> PeerDesk:
        return self._inner.desk

    def take_servable(self, limit: int) -> ServableChanges:
        return self._inner.take_servable(limit)

    def walk_servable(self, cursor: int, limit: int) -> tuple[list[bytes], int | None]:
        return self._inner.walk_servable(cursor, limit)

    def found(self, quest: int, candidates: Sequence[Candidate]) -> None:
        self._marks.note("found")
        self._inner.found(quest, candidates)
        self._marks.note("decided")

    def agreed(self, card: PeerCard) -> None:
        self._inner.agreed(card)

    def lost(self, peer: PeerId, reason: str) -> None:
        self._inner.lost(peer, reason)

    def answered(self, peer: PeerId, answer: Answer) -> None:
        self._marks.note("answered")
        self._inner.answered(peer, answer)

    def renewed(self, peer: PeerId, number: int, turn: int, seconds: float) -> None:
        self._inner.renewed(peer, number, turn, seconds)
