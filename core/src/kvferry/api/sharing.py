"""What instances say to each other about chunks that one reads out of the other's memory."""

from __future__ import annotations

import enum
from collections.abc import Sequence
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
    """In ``region``; the same on every rank."""
    tokens: int
    """How many tokens from the head are to be had, skipped ones included."""
    seconds: float
    region: str = "arena"
    """Of each rank's channel: ``slots`` are cut out of it. The same on every rank."""


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
        """Lend what there is. ``None`` if the answer follows, by :meth:`PeerCarrier.answer`, or if the same
        question is being answered already: there is one answer."""
        ...

    def renew(self, peer: PeerId, number: int) -> float:
        """Let a grant last its time from now on once more; the seconds that it lasts, 0 if it has ended."""
        ...

    def done(self, peer: PeerId, number: int) -> None:
        """The peer reads no more of what it asked for under this number, or never will."""
        ...


@frozen(kw_only=True)
class RankCard:
    """One rank of an instance. ``shard`` is a digest of what it holds of the KV cache, and how. ``export`` is
    that of its channel, :meth:`kvferry.api.Channel.export`."""

    shard: bytes
    slot_bytes: int
    export: bytes


@frozen(kw_only=True)
class PeerCard:
    """Who an instance is, and all in which two must be alike before one reads from the other: everything but
    ``id`` and the exports. ``channel`` is the name under which the channel is chosen."""

    id: PeerId
    namespace: bytes
    chunk_tokens: int
    block_tokens: int
    channel: str
    ranks: tuple[RankCard, ...]


@frozen
class ServableChanges:
    """What came and went since the last time, each chunk in one of the two. If ``lost`` is true more
    happened than was kept: all has to be told anew, by a walk that begins after this was taken."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    lost: bool = False


class PeerHost(Protocol):
    """What core hears from whoever carries messages between instances, and tells it. Threads: any; nothing
    waits for the engine. What comes late, twice, or about something that has ended is passed over."""

    @property
    def desk(self) -> PeerDesk:
        """Answers peers."""
        ...

    def take_servable(self, limit: int) -> ServableChanges:
        """Up to ``limit`` full chunks that came or went since the last time."""
        ...

    def walk_servable(self, cursor: int, limit: int) -> tuple[list[bytes], int | None]:
        """Some full chunks that peers can be served with, ``limit`` at the most, and where to go on; ``None``
        when that was all. A walk begins at 0; a chunk that is there all the time is told of once."""
        ...

    def found(self, quest: int, candidates: Sequence[Candidate]) -> None:
        """Who may have what was looked for, the best first; nobody if that cannot be known."""
        ...

    def agreed(self, card: PeerCard) -> None:
        """A peer that was to be greeted is like this instance."""
        ...

    def lost(self, peer: PeerId, reason: str) -> None:
        """A peer cannot be reached, is not like this instance, or is gone."""
        ...

    def answered(self, peer: PeerId, answer: Answer) -> None:
        """What a peer says to an ask."""
        ...

    def renewed(self, peer: PeerId, number: int, turn: int, seconds: float) -> None:
        """What a peer says to a renewal: so long the grant lasts from its answer on."""
        ...


class PeerCarrier(Protocol):
    """Carries messages between the schedulers of instances, and knows who may have what. Of a plugin.

    ``open`` and ``close`` from one thread; the rest from core's service thread. None but ``close`` waits.
    """

    def open(self, host: PeerHost, card: PeerCard) -> None:
        """All ranks can be read from now on. Not called before, and once."""
        ...

    def served(self) -> None:
        """Chunks came or went: :meth:`PeerHost.take_servable` has them."""
        ...

    def find(self, quest: int, digests: Sequence[bytes], deadline: float) -> None:
        """Who has the longest beginning of these? For :meth:`PeerHost.found`, by the deadline."""
        ...

    def greet(self, peer: PeerId, address: bytes) -> None:
        """For :meth:`PeerHost.agreed` or :meth:`PeerHost.lost`."""
        ...

    def ask(self, peer: PeerId, ask: PeerAsk) -> None:
        """For :meth:`PeerHost.answered`."""
        ...

    def renew(self, peer: PeerId, number: int, turn: int) -> None:
        """For :meth:`PeerHost.renewed`."""
        ...

    def done(self, peer: PeerId, number: int) -> None:
        """Nothing is read under this number any more, or ever will be."""
        ...

    def answer(self, peer: PeerId, answer: Answer) -> None:
        """Tell a peer the answer to an ask for which :meth:`PeerDesk.ask` gave none."""
        ...

    def close(self, deadline: float) -> None:
        """Say goodbye, and call nobody back after this. Idempotent. Raises
        :class:`kvferry.api.KVFerryError` of kind ``TIMEOUT`` when that is not over by the deadline."""
        ...
