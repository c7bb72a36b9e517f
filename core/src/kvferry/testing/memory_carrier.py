"""A carrier between instances of one process: for tests of everything but the network."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from attrs import define, field

from kvferry.api import Answer, Candidate, ErrorKind, KVFerryError, PeerAsk, PeerCard, PeerHost, PeerId

_AT_ONCE = 1024


@define(eq=False)
class _Member:
    host: PeerHost
    card: PeerCard
    chunks: set[bytes] = field(factory=set)


@define(eq=False)
class PeerNetwork:
    """Who is there, and who has what. Threads: any."""

    members: dict[PeerId, _Member] = field(factory=dict)
    lock: threading.Lock = field(factory=threading.Lock)
    cut: set[PeerId] = field(factory=set)
    """Nobody hears these, nor do they hear anybody."""

    def reach(self, peer: PeerId) -> _Member | None:
        with self.lock:
            return None if peer in self.cut else self.members.get(peer)


class MemoryCarrier:
    """A :class:`kvferry.api.PeerCarrier` over ``network``. Messages are carried one after the other, by a
    thread of its own."""

    def __init__(self, network: PeerNetwork) -> None:
        self._network = network
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._me: _Member | None = None

    def open(self, host: PeerHost, card: PeerCard) -> None:
        self._me = _Member(host, card)
        with self._network.lock:
            self._network.members[card.id] = self._me
        self._thread = threading.Thread(target=self._run, name="kvferry-memory-carrier", daemon=True)
        self._thread.start()
        self._jobs.put(self._walk)

    def served(self) -> None:
        self._jobs.put(self._follow)

    def find(self, quest: int, digests: Sequence[bytes], deadline: float) -> None:
        self._jobs.put(lambda: self._own.host.found(quest, self._candidates(digests)))

    def greet(self, peer: PeerId, address: bytes) -> None:
        self._jobs.put(lambda: self._greet(peer))

    def ask(self, peer: PeerId, ask: PeerAsk) -> None:
        self._jobs.put(lambda: self._ask(peer, ask))

    def renew(self, peer: PeerId, number: int, turn: int) -> None:
        def carry() -> None:
            there = self._reach(peer)
            if there is not None:
                seconds = there.host.desk.renew(self._own.card.id, number)
                self._own.host.renewed(peer, number, turn, seconds)

        self._jobs.put(carry)

    def done(self, peer: PeerId, number: int) -> None:
        def carry() -> None:
            there = self._reach(peer)
            if there is not None:
                there.host.desk.done(self._own.card.id, number)

        self._jobs.put(carry)

    def answer(self, peer: PeerId, answer: Answer) -> None:
        def carry() -> None:
            there = self._reach(peer)
            if there is not None:
                there.host.answered(self._own.card.id, answer)

        self._jobs.put(carry)

    def flush(self, seconds: float) -> bool:
        """Wait until what was handed over so far has been carried; whether it was, or never will be."""
        if self._thread is None:
            return True
        carried = threading.Event()
        self._jobs.put(carried.set)
        return carried.wait(seconds)

    def close(self, deadline: float) -> None:
        if self._thread is None:
            return
        with self._network.lock:
            self._network.members.pop(self._own.card.id, None)
        self._jobs.put(None)
        self._thread.join(10.0)
        if self._thread.is_alive():
            raise KVFerryError("the carrier does not end", kind=ErrorKind.TIMEOUT)
        self._thread = None

    @property
    def _own(self) -> _Member:
        assert self._me is not None, "open() was not called"
        return self._me

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _reach(self, peer: PeerId) -> _Member | None:
        """Who hears what we say."""
        return self._network.reach(peer) if self._network.reach(self._own.card.id) else None

    def _walk(self) -> None:
        own = self._own
        cursor: int | None = 0
        while cursor is not None:
            found, cursor = own.host.walk_servable(cursor, _AT_ONCE)
            own.chunks.update(found)

    def _follow(self) -> None:
        own = self._own
        changes = own.host.take_servable(_AT_ONCE)
        if changes.lost:
            own.chunks.clear()
            self._walk()
        own.chunks.update(changes.added)
        own.chunks.difference_update(changes.removed)

    def _candidates(self, digests: Sequence[bytes]) -> list[Candidate]:
        with self._network.lock:
            others = [each for each in self._network.members.values() if each is not self._own]
        found = []
        for other in others:
            length = next(
                (at for at, digest in enumerate(digests) if digest not in other.chunks), len(digests)
            )
            if length:
                found.append(Candidate(peer=other.card.id, address=b"memory", chunks=length))
        return sorted(found, key=lambda each: -each.chunks)

    def _greet(self, peer: PeerId) -> None:
        there = self._reach(peer)
        if there is None:
            self._own.host.lost(peer, "nobody answers")
        else:
            self._own.host.agreed(there.card)

    def _ask(self, peer: PeerId, ask: PeerAsk) -> None:
        there = self._reach(peer)
        if there is None:
            return  # as on a network: it is never answered
        answer = there.host.desk.ask(self._own.card.id, ask)
        if answer is not None:
            self._own.host.answered(peer, answer)
