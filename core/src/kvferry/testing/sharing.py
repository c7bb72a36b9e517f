"""Stand-ins for what instances share with each other."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.api import (
    Answer,
    Candidate,
    PeerAsk,
    PeerCard,
    PeerCarrier,
    PeerDesk,
    PeerHost,
    PeerId,
    Refusal,
    Refused,
    ServableChanges,
)


class NullPeerDesk:
    """Lends nothing."""

    def ask(self, peer: PeerId, ask: PeerAsk) -> Answer | None:
        return Refused(ask.number, Refusal.NOTHING)

    def renew(self, peer: PeerId, number: int) -> float:
        return 0.0

    def done(self, peer: PeerId, number: int) -> None:
        pass


class ForwardingPeerDesk:
    """Hands every call on to ``inner``. To derive from."""

    def __init__(self, inner: PeerDesk) -> None:
        self.inner = inner

    def ask(self, peer: PeerId, ask: PeerAsk) -> Answer | None:
        return self.inner.ask(peer, ask)

    def renew(self, peer: PeerId, number: int) -> float:
        return self.inner.renew(peer, number)

    def done(self, peer: PeerId, number: int) -> None:
        self.inner.done(peer, number)


class NullPeerHost:
    """Has nothing, and wants nothing."""

    @property
    def desk(self) -> PeerDesk:
        return NullPeerDesk()

    def take_servable(self, limit: int) -> ServableChanges:
        return ServableChanges()

    def walk_servable(self, cursor: int, limit: int) -> tuple[list[bytes], int | None]:
        return [], None

    def found(self, quest: int, candidates: Sequence[Candidate]) -> None:
        pass

    def agreed(self, card: PeerCard) -> None:
        pass

    def lost(self, peer: PeerId, reason: str) -> None:
        pass

    def answered(self, peer: PeerId, answer: Answer) -> None:
        pass

    def renewed(self, peer: PeerId, number: int, turn: int, seconds: float) -> None:
        pass


class ForwardingPeerHost:
    """Hands every call on to ``inner``. To derive from."""

    def __init__(self, inner: PeerHost) -> None:
        self.inner = inner

    @property
    def desk(self) -> PeerDesk:
        return self.inner.desk

    def take_servable(self, limit: int) -> ServableChanges:
        return self.inner.take_servable(limit)

    def walk_servable(self, cursor: int, limit: int) -> tuple[list[bytes], int | None]:
        return self.inner.walk_servable(cursor, limit)

    def found(self, quest: int, candidates: Sequence[Candidate]) -> None:
        self.inner.found(quest, candidates)

    def agreed(self, card: PeerCard) -> None:
        self.inner.agreed(card)

    def lost(self, peer: PeerId, reason: str) -> None:
        self.inner.lost(peer, reason)

    def answered(self, peer: PeerId, answer: Answer) -> None:
        self.inner.answered(peer, answer)

    def renewed(self, peer: PeerId, number: int, turn: int, seconds: float) -> None:
        self.inner.renewed(peer, number, turn, seconds)


class NullPeerCarrier:
    """Carries nothing: whatever is asked is never answered."""

    def open(self, host: PeerHost, card: PeerCard) -> None:
        pass

    def served(self) -> None:
        pass

    def find(self, quest: int, digests: Sequence[bytes], deadline: float) -> None:
        pass

    def greet(self, peer: PeerId, address: bytes) -> None:
        pass

    def ask(self, peer: PeerId, ask: PeerAsk) -> None:
        pass

    def renew(self, peer: PeerId, number: int, turn: int) -> None:
        pass

    def done(self, peer: PeerId, number: int) -> None:
        pass

    def answer(self, peer: PeerId, answer: Answer) -> None:
        pass

    def close(self, deadline: float) -> None:
        pass


class ForwardingPeerCarrier:
    """Hands every call on to ``inner``. To derive from."""

    def __init__(self, inner: PeerCarrier) -> None:
        self.inner = inner

    def open(self, host: PeerHost, card: PeerCard) -> None:
        self.inner.open(host, card)

    def served(self) -> None:
        self.inner.served()

    def find(self, quest: int, digests: Sequence[bytes], deadline: float) -> None:
        self.inner.find(quest, digests, deadline)

    def greet(self, peer: PeerId, address: bytes) -> None:
        self.inner.greet(peer, address)

    def ask(self, peer: PeerId, ask: PeerAsk) -> None:
        self.inner.ask(peer, ask)

    def renew(self, peer: PeerId, number: int, turn: int) -> None:
        self.inner.renew(peer, number, turn)

    def done(self, peer: PeerId, number: int) -> None:
        self.inner.done(peer, number)

    def answer(self, peer: PeerId, answer: Answer) -> None:
        self.inner.answer(peer, answer)

    def close(self, deadline: float) -> None:
        self.inner.close(deadline)
