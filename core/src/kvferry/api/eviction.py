"""The eviction contract. A policy orders victims; the manager says which may go."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from attrs import frozen

NO_PARENT = -1


@frozen
class EntryView:
    """What a policy may know of a resident chunk.

    ``id`` is small, dense and reused after ``remove``. ``parent`` is the id of the chunk before it,
    which is resident as long as this one is, or ``NO_PARENT``. ``depth`` counts chunks from the start
    of the prompt (0 is the head). ``size`` is in the unit of ``evict``'s ``need``: slots, in a tier
    of equal slots. ``owner`` is the cache salt. ``key`` is the digest of the chunk: what stays the
    same when it goes and comes back under another id.
    """

    id: int
    parent: int
    depth: int
    size: int
    owner: str
    key: bytes


class Claim(enum.Enum):
    """Answer to a policy that wants an entry as a victim."""

    TAKEN = "taken"
    """It is yours; all its successors were taken before it."""
    HAS_SUCCESSORS = "has-successors"
    """A chunk behind it stays; take that one first or look elsewhere. The policy may forget the
    entry: it may offer it again in this call once it took what stood behind it, and later the
    manager calls ``release`` when the last chunk behind it has gone."""
    LEASED = "leased"
    """In use, pinned or not yet visible. The manager calls ``touch`` or ``release`` when that
    changes, so the policy may forget the entry until then."""


@frozen
class Evicted:
    """Exactly enough was claimed: ``ids`` in the order of the claims."""

    ids: tuple[int, ...]


@frozen
class NotEnough:
    """The claimable entries do not add up to what was needed, but to ``available``. Nothing was taken."""

    available: int


class EvictionPolicy(Protocol):
    """Chooses victims among resident chunks of one tier.

    Thread: always called under the manager's lock; must not block. A policy owns no clock and no
    randomness beyond a seed in its options. Tails go before heads because a claim on an entry with
    resident successors is refused: a policy never has to know the tree, but one that offers deep
    entries first among equals is asked less often.

    Wherever ``ids`` are many they come as a memory view of 64-bit integers: ``numpy.asarray(ids)``
    copies nothing, and iterating yields plain ints.
    """

    def open(self, entries: int) -> None:
        """Called once, before anything else. Every id will be below ``entries``.

        Room for all of them is best taken here: a table that grows later copies itself at some
        unlucky call, under the manager's lock.
        """
        ...

    def insert(self, entry: EntryView) -> None:
        """A chunk became resident (visible). It counts as just used."""
        ...

    def touch(self, ids: Sequence[int]) -> None:
        """These chunks, a prefix in order head to tail, were just used as one access."""
        ...

    def release(self, ids: Sequence[int]) -> None:
        """These chunks can be claimed again. Not an access: recency does not change."""
        ...

    def remove(self, ids: Sequence[int]) -> None:
        """These chunks are gone; their ids may come back for others.

        A chunk goes in the same call as those before it, or earlier; never later.
        """
        ...

    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        """Claim entries until their sizes reach ``need``.

        ``claim`` answers at once. After ``Evicted`` the manager calls ``remove`` with the same ids.
        After ``NotEnough`` it undoes all claims of this call, and the policy goes on as if it had not
        been asked: what it took is there again, in the order that it had. Only entries that were
        refused during the call (``HAS_SUCCESSORS``, ``LEASED``) may stay forgotten, as after any
        other refusal, and so be passed over by evictions until ``release`` or ``touch`` names them.
        Unless something was evicted meanwhile, they then stand where they stood before the call.
        """
        ...


class QuotaPolicy(EvictionPolicy, Protocol):
    """A policy that keeps the owners of chunks apart; its spec claims ``quotas``.

    The policy keeps the quotas, in bytes, because they are its options; the manager counts what each
    owner holds, reservations included, and enforces them at admission: before a write of an owner
    would pass its quota, :meth:`evict_owned` makes room among the owner's own chunks, and what still
    does not fit is refused. So no owner is ever above its quota, unless the quota was lowered since.

    ``owner`` is a cache salt; the empty string is the owner of requests without one. Quotas can be asked
    for and changed before :meth:`open` too: they are values, like the options.
    """

    def quota(self, owner: str) -> int | None:
        """Bytes that ``owner`` may hold; ``None`` is without limit. Owners without a quota of their
        own get the default."""
        ...

    def default_quota(self) -> int | None:
        """Bytes for each owner without a quota of its own; ``None`` is without limit."""
        ...

    def set_default_quota(self, quota: int | None) -> None:
        """Change the default, at run time. Evicts nothing by itself."""
        ...

    def quotas(self) -> Mapping[str, int | None]:
        """The owners with a quota of their own, which are the only ones that statistics name."""
        ...

    def set_quota(self, owner: str, quota: int | None) -> None:
        """Give ``owner`` a quota of its own, at run time. Evicts nothing by itself."""
        ...

    def forget_quota(self, owner: str) -> bool:
        """Let the default apply to ``owner`` again; ``False`` if it had no quota of its own."""
        ...

    def evict_owned(self, owner: str, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        """As :meth:`evict`, among the chunks of ``owner`` alone."""
        ...
