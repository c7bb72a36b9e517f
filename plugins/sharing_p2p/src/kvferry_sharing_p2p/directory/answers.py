"""What the directory answers."""

from __future__ import annotations

import enum

from attrs import field, frozen, validators

from kvferry.api import ErrorKind, KVFerryError


@frozen(kw_only=True)
class DirectoryOptions:
    """Times in seconds.

    Raises :class:`kvferry.api.KVFerryError` when the limit leaves no room for a single lost heartbeat: whole
    instances would come and go.
    """

    heartbeat_seconds: float = field(default=2.0, validator=validators.gt(0.0))
    """How often each instance says that it lives."""
    limit_seconds: float = 10.0
    """Who was not heard for longer is gone, and its keys with it."""
    resync_seconds: float = field(default=30.0, validator=validators.gt(0.0))
    """A resynchronisation that does not move for so long is given up, and asked for again."""
    max_instances: int = field(default=1024, validator=validators.ge(1))

    def __attrs_post_init__(self) -> None:
        if self.limit_seconds < 2 * self.heartbeat_seconds:
            raise KVFerryError(
                "the heartbeat limit is less than two heartbeats",
                kind=ErrorKind.CONFIG,
                where="limit_seconds",
                why=f"{self.limit_seconds:g} s with a heartbeat every {self.heartbeat_seconds:g} s",
                remedy="make it three heartbeats or more",
            )


class Wanted(enum.Enum):
    """What the directory needs before an instance's keys are right again."""

    NOTHING = "nothing"
    CHANGES = "changes"
    """Something was lost on the way: what comes behind ``applied``, once more."""
    SNAPSHOT = "snapshot"
    """Everything the instance has, from the beginning."""


class RefusalReason(enum.Enum):
    """Why an instance is not taken in."""

    TAKEN = "taken"
    """Another instance with this id lives."""
    CONTRADICTION = "contradiction"
    """The same life of the same instance has said something else of itself before."""
    FULL = "full"


@frozen(kw_only=True)
class Registration:
    """An instance is taken in."""

    session: bytes
    """Names this registration; everything the instance sends from now on carries it."""
    heartbeat_seconds: float
    limit_seconds: float
    applied: int
    wanted: Wanted


@frozen(kw_only=True)
class Refusal:
    """An instance is not taken in."""

    reason: RefusalReason
    text: str
    """One sentence for whoever runs the instance."""
    retry_seconds: float
    """When it may ask again."""


@frozen(kw_only=True)
class Progress:
    """How far the directory has followed an instance."""

    session: bytes
    applied: int
    """Sequence number of the last message that took effect."""
    wanted: Wanted


@frozen(kw_only=True)
class Stranger:
    """The directory does not know this session (any more): the instance has to register."""

    session: bytes


@frozen(kw_only=True)
class Holder:
    """An instance that has the first ``chunks`` chunks asked for, as far as is known here."""

    instance: str
    epoch: bytes
    address: bytes
    ranks: int
    chunks: int


@frozen(kw_only=True)
class Found:
    """Who has a prefix."""

    holders: tuple[Holder, ...]
    """The longest first; none if nobody has its first chunk."""
    settled: bool
    """False while the directory may know less than there is: it, or an instance, has just started."""


class SyncState(enum.Enum):
    """Whether the directory has an instance's keys."""

    WANTED = "wanted"
    """They are not known, or may be outdated: it was asked for all."""
    RUNNING = "running"
    """They are on their way."""
    CURRENT = "current"


@frozen(kw_only=True)
class InstanceStatus:
    """What an operator may want to know of one instance."""

    instance: str
    epoch: str
    """In hexadecimal digits."""
    namespace: str
    """In hexadecimal digits."""
    ranks: int
    keys: int
    """That can be found now."""
    incoming_keys: int
    """Of the set that will take their place, while a resynchronisation runs."""
    sync: SyncState
    lag: int
    """Messages that the instance has sent and that did not take effect (yet)."""
    heard_seconds: float
    """How long ago it was heard last."""
    handed_out: int
    """How often it was the first answer."""


@frozen(kw_only=True)
class Totals:
    """Counts since the directory started."""

    registered: int = 0
    refused: int = 0
    expired_instances: int = 0
    expired_keys: int = 0
    """What instances had that were not heard any more."""
    changes: int = 0
    """Keys told as added or removed, parts of snapshots included."""
    duplicates: int = 0
    """Messages that came again."""
    gaps: int = 0
    """Messages before which another was missing."""
    resyncs: int = 0
    """That were completed."""
    abandoned_resyncs: int = 0
    lookups: int = 0
    hits: int = 0


@frozen(kw_only=True)
class DirectoryStatus:
    """The directory as a whole."""

    epoch: str
    """In hexadecimal digits."""
    instances: tuple[InstanceStatus, ...]
    """In the order of their names."""
    keys: int
    """Different ones."""
    memory_bytes: int
    totals: Totals
