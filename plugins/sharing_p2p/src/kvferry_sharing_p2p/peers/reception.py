"""What peers ask of this instance: frames in, frames out."""

from __future__ import annotations

from attrs import define, field

from kvferry.api import KVFerryError, PeerCard, PeerDesk, PeerId
from kvferry_sharing_p2p.peers.likeness import difference
from kvferry_sharing_p2p.peers.messages import (
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

    def answer(self, connection: bytes, frame: bytes) -> bytes | None:
        """The answer to a frame; ``None`` if there is none to give. Never raises for what is in a frame."""
        try:
            message = self._codec.read_to_holder(frame, "a peer")
        except KVFerryError as error:
            self.rejected += 1
            return self._codec.encode(Unwelcome("", error.what))
        if isinstance(message, Hello):
            return self._codec.encode(self._welcome(connection, message))
        guest = self._guests.get(connection)
        answer: ToAsker | None = None
        if guest is None:
            answer = Stranger()
        elif isinstance(message, Ask):
            told = self.desk.ask(guest, ask_of(message))
            answer = None if told is None else answer_message(told)
        elif isinstance(message, Renew):
            answer = Renewed(message.number, message.turn, self.desk.renew(guest, message.number))
        elif isinstance(message, Done):
            self.desk.done(guest, message.number)
        return None if answer is None else self._codec.encode(answer)

    def _welcome(self, connection: bytes, hello: Hello) -> Welcome | Unwelcome:
        if hello.to != self.card.id.epoch:
            return Unwelcome("", "this is another life of the instance that is meant")
        asker = card_of(hello.card)
        unlike = difference(asker, self.card)
        if unlike:
            return Unwelcome("", unlike)
        self._guests.pop(connection, None)
        while len(self._guests) >= MOST_GUESTS:
            del self._guests[next(iter(self._guests))]
        self._guests[connection] = asker.id
        return Welcome(card_message(self.card))
