"""What instances say to each other about chunks that one reads out of the other's memory."""

from __future__ import annotations

import enum
from typing import Protocol

from attrs import frozen


@frozen(order=True)
class PeerId:
    """One life of another instance. ``epoch`` is 16 random bytes, new at every start."""

    instance: str
    epoch: bytes


@frozen(kw_only=True)
class Candidate:
    """Who may have a prefix, as a directory says: a hint, and no promise.

    ``chunks`` of those that were asked for, from the first. ``address`` is where its scheduler is reached.
    """

    peer: PeerId
    address: bytes
    chunks: int


@frozen(kw_only=True)
class PeerAsk:
    """A peer wants to read the longest prefix of ``keys``, digests of full chunks from the head, and then
    of ``tails``, beginnings of the chunk behind them with their tokens, the longest first.

    ``skip`` chunks of it the peer has itself: they are not lent. ``number`` grows with every ask of the
    peer's life, and none is used twice.
    """

    number: int
    keys: tuple[bytes, ...]
    tails: tuple[tuple[bytes, int], ...] = ()
    skip: int = 0
    limit_tokens: int


class Refusal(enum.Enum):
    """Why nothing was lent. Each is a miss for who asked."""

    NOTHING = "nothing"
    """There is no such chunk here beyond those that the peer has."""
    BUSY = "busy"
    """As much as peers may have is lent already."""
    ENDED = "ended"
    """This ask was done with before it came, or came a second time after it was."""


@frozen(kw_only=True)
class LentChunk:
    """A chunk of a grant. ``parent`` is ``None`` and ``depth`` 0 at the head of a chain; ``aliases`` are
    further names with the tokens that each covers, for beginnings of it. ``seconds`` it has left to live,
    infinity if it does not expire. ``model`` is an adapter's name, empty for the base model."""

    digest: bytes
    parent: bytes | None
    depth: int
    tokens: int
    aliases: tuple[tuple[bytes, int], ...] = ()
    model: str = ""
    seconds: float = float("inf")


@frozen(kw_only=True)
class Grant:
    """These chunks stay as they are for ``seconds`` from the moment in which the ask was answered.

    ``chunks`` and their ``slots`` begin behind what was skipped. The last may be a tail, or hold more tokens
    than were asked for if its beginning was.
    """

    number: int
    chunks: tuple[LentChunk, ...]
    slots: tuple[int, ...]
    """In the first tier; the same on every rank."""
    tokens: int
    """How many tokens from the head are to be had, skipped ones included."""
    seconds: float


@frozen
class Refused:
    number: int
    reason: Refusal


Answer = Grant | Refused


class PeerDesk(Protocol):
    """What core does for peers that read from this instance, for whoever carries their messages.

    Threads: any. Nothing waits for the engine, whether it computes or is idle; a long question gives way to
    others in between. Messages may come late, twice, and in any order.
    """

    def ask(self, peer: PeerId, ask: PeerAsk) -> Answer | None:
        """Lend what there is. ``None`` for a question that is being answered already: there is one answer."""
        ...

    def renew(self, peer: PeerId, number: int) -> float:
        """Let a grant last its time from now on once more; the seconds that it lasts, 0 if it has ended."""
        ...

    def done(self, peer: PeerId, number: int) -> None:
        """The peer reads no more of what it asked for under this number, or never will."""
        ...
