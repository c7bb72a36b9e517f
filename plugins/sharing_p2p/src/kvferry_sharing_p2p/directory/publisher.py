"""An instance's half of the directory: it tells what the instance can serve, until that has arrived."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Protocol

from attrs import field, frozen, validators

from kvferry.api import ErrorKind, KVFerryError
from kvferry_sharing_p2p.directory.answers import Progress, Registration, Wanted
from kvferry_sharing_p2p.directory.backlog import Gathered, Numbered, Unacknowledged
from kvferry_sharing_p2p.directory.messages import (
    MAXIMUM_KEYS,
    WIRE_VERSION,
    Accepted,
    Beat,
    BeginAll,
    Bye,
    Changes,
    EndAll,
    Followed,
    FromDirectory,
    Hello,
    Refused,
    Rejected,
    SomeOfAll,
    ToDirectory,
    Unknown,
)

_LEAP = 1 << 32
"""More messages than anybody has under way."""


class KeySource(Protocol):
    """Everything that an instance can serve, a piece at a time. Called by :meth:`Publisher.poll` alone."""

    def walk(self, cursor: int, limit: int) -> tuple[bytes, int | None]:
        """Up to ``limit`` digests that can be served now, one behind the other, and where to go on; None when
        that was all.

        A walk begins at 0 and may take long. A key that is there from its beginning to its end is among
        the pieces. One that comes or goes meanwhile may be or not, but the publisher is told of it, at the
        latest when the walk has ended.
        """
        ...


@frozen(kw_only=True)
class Identity:
    """Who publishes."""

    instance: str
    epoch: bytes
    """16 random bytes, new at every start."""
    namespace: bytes
    ranks: int
    address: bytes
    """What peers need in order to reach this instance."""


@frozen(kw_only=True)
class PublisherOptions:
    """Times in seconds. Raises :class:`kvferry.api.KVFerryError` for batches that no message can carry."""

    batch_keys: int = field(default=1024, validator=validators.ge(1))
    """Changes are told together, up to so many,"""
    batch_seconds: float = 0.05
    """and wait so long for others."""
    backlog_keys: int = field(default=65536, validator=validators.ge(1))
    """More changes than so many are not kept until the directory has them: all keys are told anew then."""
    part_keys: int = field(default=1024, validator=validators.ge(1))
    """When all keys are told, so many at a time,"""
    parts_under_way: int = field(default=8, validator=validators.ge(1))
    """and so many parts before the first of them has arrived."""
    resend_seconds: float = field(default=1.0, validator=validators.gt(0.0))
    """What is not answered is sent again."""
    hello_seconds: float = field(default=1.0, validator=validators.gt(0.0))
    """The same of a hello."""
    rejected_seconds: float = field(default=30.0, validator=validators.gt(0.0))
    """When to try again after the directory did not understand a hello."""

    def __attrs_post_init__(self) -> None:
        for name in ("batch_keys", "part_keys"):
            if getattr(self, name) > MAXIMUM_KEYS:
                raise KVFerryError(
                    f"{name} is {getattr(self, name)}, and a message carries {MAXIMUM_KEYS} keys",
                    kind=ErrorKind.CONFIG,
                    where=name,
                    remedy=f"set it to {MAXIMUM_KEYS} or less",
                )


class PublisherState(enum.Enum):
    """Where a publisher stands with its directory."""

    SEEKING = "seeking"
    """No directory has taken the instance in (yet)."""
    REFUSED = "refused"
    """The directory does not take it in; it is asked again."""
    RESYNCING = "resyncing"
    """All keys are being told, or are going to be."""
    CURRENT = "current"
    """The directory has everything, but for changes under way."""
    LEFT = "left"


@frozen(kw_only=True)
class PublisherStatus:
    """How things stand between an instance and the directory."""

    state: PublisherState
    refusal: str
    """What the directory said last of not taking the instance, or a message of it, in; empty if it does."""
    heard_seconds: float
    """How long ago the directory answered last; infinity if it never did."""
    gathered_keys: int
    """Changes that were not sent yet."""
    unacknowledged: int
    """Messages that were sent and are not known to have arrived."""
    resyncs: int
    """How often all keys were told, from the beginning."""
    overflows: int
    """How often the backlog grew too long."""


class Publisher:
    """Follows the chunks that an instance can serve, and has the directory follow, whatever gets lost.

    It decides what to send and never sends: :meth:`poll` gives messages, in their order, and
    :meth:`receive` takes the answers. Messages may be lost, doubled, late, and in another order. Nothing is
    kept of all keys: when they have to be told anew, ``source`` is walked, while changes go on. Only chunks
    that peers can be served with belong to either.

    Times are seconds of any clock that does not go back. Not thread-safe.
    """

    def __init__(self, identity: Identity, source: KeySource, options: PublisherOptions) -> None:
        self._identity = identity
        self._source = source
        self._options = options
        self._attempt = 0
        self._hello_at = -math.inf
        self._refusal = ""
        self._left = False
        self._heard = -math.inf
        self._registration: Registration | None = None
        self._beat_at = 0.0
        self._sequence = 0
        """Of the last message; never goes back, over sessions either."""
        self._acknowledged = 0
        self._gathered = Gathered()
        self._sent = Unacknowledged()
        self._again = False
        """Send everything once more that is not acknowledged."""
        self._again_from = (-1, -math.inf)
        """For the sake of which message, and when, that was done last."""
        self._tell_all = False
        """All keys have to be told anew; until that begins, changes are of no interest."""
        self._unheard = False
        """Nothing was heard since the backlog grew too long, so there is no use in beginning."""
        self._cursor: int | None = None
        """Where the walk goes on; None when there is none."""
        self._end = 0
        """Sequence number of the end of the last resynchronisation."""
        self._resyncs = 0
        self._overflows = 0

    def added(self, digests: Iterable[bytes], now: float) -> None:
        """These can be served from now on."""
        self._note(digests, True, now)

    def removed(self, digests: Iterable[bytes], now: float) -> None:
        """These cannot be served any more."""
        self._note(digests, False, now)

    def changes_lost(self) -> None:
        """Changes happened that nobody can name: all keys have to be told anew."""
        unheard = self._unheard
        self._start_over()
        self._unheard = unheard

    def reconnected(self, now: float) -> None:
        """The way to the directory was broken and is there again: ask at once what has arrived."""
        self._hello_at = self._beat_at = now

    def poll(self, now: float) -> list[ToDirectory]:
        """What to send now, in this order. To be called after changes and answers, and at :meth:`due`."""
        if self._left:
            return []
        if self._registration is None:
            if now < self._hello_at:
                return []
            self._hello_at = now + self._options.hello_seconds
            return [self._hello()]
        messages: list[ToDirectory] = list(self._resent(now))
        session = self._registration.session
        if self._tell_all and not self._unheard:
            messages.append(self._send(BeginAll(session=session, sequence=self._next()), now))
            self._tell_all = False
            self._cursor = 0
            self._resyncs += 1
        while self._gathered.due(self._options.batch_keys, self._options.batch_seconds) <= now:
            added, removed = self._gathered.take(self._options.batch_keys)
            message = Changes(session=session, sequence=self._next(), added=added, removed=removed)
            messages.append(self._send(message, now))
        messages += self._walk(session, now)
        if now >= self._beat_at:
            self._beat_at = now + self._registration.heartbeat_seconds
            messages.append(Beat(session=session, sequence=self._sequence))
        return messages

    def due(self) -> float:
        """When :meth:`poll` has something to send, if nothing happens before; infinity after leaving."""
        if self._left:
            return math.inf
        if self._registration is None:
            return self._hello_at
        if self._again or (self._tell_all and not self._unheard) or self._may_walk():
            return -math.inf
        return min(
            self._beat_at,
            self._sent.due(self._options.resend_seconds),
            self._gathered.due(self._options.batch_keys, self._options.batch_seconds),
        )

    def receive(self, message: FromDirectory, now: float) -> None:
        """An answer came. What was not asked for, or is of no concern any more, is passed over."""
        self._heard = now
        match message:
            case Followed():
                self._follow(message.progress, now)
            case Unknown():
                if self._registration and message.stranger.session == self._registration.session:
                    self._forget_session()
                    self._hello_at = now
            case Accepted():
                if self._is_asked(message):
                    self._start_session(message.registration, now)
            case Refused():
                if self._is_asked(message):
                    self._refusal = message.refusal.text
                    wait = max(message.refusal.retry_seconds, self._options.hello_seconds)
                    self._hello_at = now + wait
            case Rejected():
                self._refusal = message.reason
                if self._registration is None or message.version != WIRE_VERSION:
                    # A directory of another release took the place of ours: what that knew is gone.
                    self._forget_session()
                    self._hello_at = now + self._options.rejected_seconds
            case _:
                pass

    def leave(self) -> list[ToDirectory]:
        """The last message, if there is one to send: the instance ends. Nothing comes after it."""
        self._left = True
        registration = self._registration
        self._forget_session()
        return [] if registration is None else [Bye(session=registration.session)]

    def status(self, now: float) -> PublisherStatus:
        """How things stand."""
        return PublisherStatus(
            state=self._state(),
            refusal=self._refusal,
            heard_seconds=now - self._heard,
            gathered_keys=len(self._gathered),
            unacknowledged=len(self._sent),
            resyncs=self._resyncs,
            overflows=self._overflows,
        )

    def _state(self) -> PublisherState:
        if self._left:
            return PublisherState.LEFT
        if self._registration is None:
            return PublisherState.REFUSED if self._refusal else PublisherState.SEEKING
        if self._tell_all or self._cursor is not None or self._acknowledged < self._end:
            return PublisherState.RESYNCING
        return PublisherState.CURRENT

    def _is_asked(self, answer: Accepted | Refused) -> bool:
        """Whether this is the answer to the last hello, and the first."""
        asked = (self._identity.epoch, self._attempt)
        return self._registration is None and (answer.epoch, answer.attempt) == asked

    def _hello(self) -> Hello:
        self._attempt += 1
        return Hello(
            version=WIRE_VERSION,
            attempt=self._attempt,
            instance=self._identity.instance,
            epoch=self._identity.epoch,
            namespace=self._identity.namespace,
            ranks=self._identity.ranks,
            address=self._identity.address,
        )

    def _note(self, digests: Iterable[bytes], there: bool, now: float) -> None:
        # Before all is told nothing of it is known there, and the walk will find it.
        if self._registration is None or self._tell_all:
            return
        self._gathered.note(digests, there, now)
        if len(self._gathered) + self._sent.changes > self._options.backlog_keys:
            self._overflows += 1
            self._start_over()
            self._unheard = True

    def _start_session(self, registration: Registration, now: float) -> None:
        self._registration = registration
        self._refusal = ""
        self._beat_at = now + registration.heartbeat_seconds
        if registration.applied > self._sequence:
            # Another publisher of this epoch was there before, and some of what it said may be under way.
            self._sequence = registration.applied + _LEAP
        self._acknowledged = registration.applied
        self._start_over()

    def _forget_session(self) -> None:
        self._registration = None
        self._start_over()

    def _start_over(self) -> None:
        self._gathered.clear()
        self._sent.clear()
        self._again = False
        self._unheard = False
        self._cursor = None
        self._tell_all = True

    def _follow(self, progress: Progress, now: float) -> None:
        if self._registration is None or progress.session != self._registration.session:
            return
        self._unheard = False
        if not self._acknowledged <= progress.applied <= self._sequence:
            return  # an answer from before the last one
        self._acknowledged = progress.applied
        self._sent.acknowledge(progress.applied)
        if progress.wanted is Wanted.SNAPSHOT:
            if not self._tell_all and not self._sent.begins_anew():
                self._start_over()
        elif progress.wanted is Wanted.CHANGES and len(self._sent):
            # Each message behind a gap is answered so; once is enough.
            applied, at = self._again_from
            if applied != progress.applied or now - at >= self._options.resend_seconds:
                self._again_from = (progress.applied, now)
                self._again = True

    def _resent(self, now: float) -> Iterable[Numbered]:
        if self._again:
            self._again = False
            return self._sent.again(now)
        oldest = self._sent.overdue(now, self._options.resend_seconds)
        return () if oldest is None else (oldest,)

    def _walk(self, session: bytes, now: float) -> Iterable[ToDirectory]:
        while self._may_walk() and self._cursor is not None:
            digests, self._cursor = self._source.walk(self._cursor, self._options.part_keys)
            part = SomeOfAll(session=session, sequence=self._next(), digests=digests)
            yield self._send(part, now)
            if self._cursor is None:
                end = EndAll(session=session, sequence=self._next())
                self._end = end.sequence
                yield self._send(end, now)

    def _may_walk(self) -> bool:
        return self._cursor is not None and self._sent.parts < self._options.parts_under_way

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _send(self, message: Numbered, now: float) -> Numbered:
        self._sent.append(message, now)
        return message
