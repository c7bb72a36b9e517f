"""What peers ask of this instance: frames in, frames out."""

from __future__ import annotations

from attrs import define, field

from kvferry.api import Answer, ErrorKind, KVFerryError, PeerCard, PeerDesk, PeerId
from kvferry_sharing_p2p.likeness_rules import WIRE_VERSION_ID
from kvferry_sharing_p2p.peers.likeness import another_life, difference
from kvferry_sharing_p2p.peers.messages import (
    MOST_REASON,
    Ask,
    Codec,
    Done,
    Hello,
    Renew,
    Renewed,
    Stranger,
    ToAsker,
    Unwelcome,
    Welcome,
)
from kvferry_sharing_p2p.peers.translation import answer_message, ask_of, card_message, card_of

MOST_GUESTS = 4096
"""Connections that are remembered; beyond that the one that said hello first has to say it again."""


@define(eq=False)
class Reception:
    """Answers by connection: who has said hello over one, and is like this instance, may ask over it.
    Threads: one at a time."""

    desk: PeerDesk
    card: PeerCard
    rejected: int = 0
    """Frames that were no messages."""
    _codec: Codec = field(factory=Codec)
    _guests: dict[bytes, PeerId] = field(factory=dict)
    _heard: dict[PeerId, bytes] = field(factory=dict)
    """The connection by which each was heard last."""

    def late_answer(self, peer: PeerId, answer: Answer) -> tuple[bytes, bytes] | None:
        """An answer that was not there when the peer asked: over which connection, and the frame. ``None`` if
        there is no way to the peer any more."""
        connection = self._heard.get(peer)
        return None if connection is None else (connection, self._codec.encode(answer_message(answer)))

    def answer(self, connection: bytes, frame: bytes) -> bytes | None:
        """The answer to a frame; ``None`` if there is none to give. Never raises for what is in a frame."""
        try:
            message = self._codec.read_to_holder(frame, "a peer")
        except KVFerryError as error:
            self.rejected += 1
            rule = WIRE_VERSION_ID if error.kind is ErrorKind.COMPATIBILITY else ""
            return self._codec.encode(Unwelcome(rule, error.what[:MOST_REASON]))
        if isinstance(message, Hello):
            return self._codec.encode(self._welcome(connection, message))
        guest = self._guests.get(connection)
        answer: ToAsker | None = None
        if guest is None:
            return self._codec.encode(Stranger())
        self._heard[guest] = connection
        if isinstance(message, Ask):
            told = self.desk.ask(guest, ask_of(message))
            answer = None if told is None else answer_message(told)
        elif isinstance(message, Renew):
            answer = Renewed(message.number, message.turn, self.desk.renew(guest, message.number))
        elif isinstance(message, Done):
            self.desk.done(guest, message.number)
        return None if answer is None else self._codec.encode(answer)

    def _welcome(self, connection: bytes, hello: Hello) -> Welcome | Unwelcome:
        asker = card_of(hello.card)
        unlike = another_life(hello.to, self.card.id.epoch) or difference(asker, self.card)
        if unlike is not None:
            return Unwelcome(unlike.rule, unlike.reason[:MOST_REASON])
        self._forget(connection)
        while len(self._guests) >= MOST_GUESTS:
            self._forget(next(iter(self._guests)))
        self._guests[connection] = asker.id
        return Welcome(card_message(self.card))

    def _forget(self, connection: bytes) -> None:
        guest = self._guests.pop(connection, None)
        if guest is not None and self._heard.get(guest) == connection:
            del self._heard[guest]
