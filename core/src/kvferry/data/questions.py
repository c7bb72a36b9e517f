"""What an operator asks a running instance, and what it answers.

They travel in :class:`kvferry.data.wire.Ask` and :class:`~kvferry.data.wire.Told`, whose form stays the
same in every version, so that a difference of versions is told and not guessed.
"""

from __future__ import annotations

import msgspec

QUESTIONS_VERSION = 3


class AskStatus(msgspec.Struct, frozen=True, tag="status"):
    """How is it going?"""


class AskClear(msgspec.Struct, frozen=True, tag="clear"):
    """Remove chunks: of a model (an adapter's name, empty for the base model), of a salt, of a tier;
    ``None`` stands for any."""

    model: str | None
    salt: str | None
    tier: str | None


class AskQuotas(msgspec.Struct, frozen=True, tag="quotas"):
    """Who has which quota in a tier, and holds how much? ``None`` stands for the first tier."""

    tier: str | None = None


class SetQuota(msgspec.Struct, frozen=True, tag="set-quota"):
    """Bytes for an owner (a salt), or with ``None`` for each owner without a quota of its own.
    ``quota`` is ``None`` for no limit, ``tier`` for the first tier."""

    owner: str | None
    quota: int | None
    tier: str | None = None


class ForgetQuota(msgspec.Struct, frozen=True, tag="forget-quota"):
    """Let the default apply to an owner again. ``tier`` is ``None`` for the first tier."""

    owner: str
    tier: str | None = None


class AskPins(msgspec.Struct, frozen=True, tag="pins"):
    """What is pinned?"""


class ExtendPin(msgspec.Struct, frozen=True, tag="extend-pin"):
    """Let the pins of a name last ``seconds`` from now; of one salt, or of all with ``None``."""

    name: str
    seconds: float
    salt: str | None


class ReleasePin(msgspec.Struct, frozen=True, tag="release-pin"):
    """End the pins of a name; of one salt, or of all with ``None``."""

    name: str
    salt: str | None


class LowerStatus(msgspec.Struct, frozen=True):
    """A tier below the first: ``numbers`` are chunks now and counters since the start, by name. ``health``
    is "open" while it is used, else "opening", "closing" or "paused"; ``reason`` is why it failed last."""

    tier: str
    health: str
    reason: str
    numbers: dict[str, int]


class PeerStatus(msgspec.Struct, frozen=True):
    """A peer that something was wanted of lately. ``standing`` is "agreed" while it may be asked, "greeting"
    or "paused"; ``reason`` is why it is not asked, or why a read from it failed last. ``epoch`` is
    hexadecimal."""

    peer: str
    epoch: str
    standing: str
    reason: str


class SharingStatus(msgspec.Struct, frozen=True):
    """What is shared with other instances by this one, ``instance`` in its life ``epoch``, over ``channel``.
    ``state`` is "open" while it is, else "opening" or "retired"; ``reason`` is why a channel was not open
    last. ``borrowed`` and ``lent`` are counters since the start and what is held now, by name."""

    instance: str
    epoch: str
    channel: str
    state: str
    reason: str
    peers: tuple[PeerStatus, ...]
    borrowed: dict[str, int]
    lent: dict[str, int]


class Status(msgspec.Struct, frozen=True, tag="status"):
    """``numbers`` are counters since the start and slots by state, by name. ``tier`` has ``slot_bytes``
    bytes a slot on one rank. ``lower`` are the tiers below it, fast to slow, and ``waiting`` what requests
    have of them: empty where there are none. ``sharing`` is ``None`` where nothing is shared."""

    tier: str
    slot_bytes: int
    workers_ready: bool
    numbers: dict[str, int]
    lower: tuple[LowerStatus, ...] = ()
    waiting: dict[str, int | float] = {}
    sharing: SharingStatus | None = None


class TierCleared(msgspec.Struct, frozen=True):
    """As :class:`Cleared`, of one tier. ``health`` as in :class:`LowerStatus`, "open" for the first: what the
    store of a tier holds that is not open goes when it is opened again, and is not counted here."""

    tier: str
    health: str
    removed: int
    kept: int
    doomed: int


class Cleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Chunks: ``removed``, ``kept`` until somebody has read them, ``doomed`` while they were written.
    ``by_tier`` has those tiers that were cleared, fast to slow; the rest is their sum."""

    removed: int
    kept: int
    doomed: int
    by_tier: tuple[TierCleared, ...]


class Owner(msgspec.Struct, frozen=True):
    """An owner with a quota of its own. Sizes in bytes, ``over_quota`` in refused chunks."""

    owner: str
    quota: int | None
    held: int
    over_quota: int


class Quotas(msgspec.Struct, frozen=True, tag="quotas"):
    """Of one tier. All owners without a quota of their own stand in one sum. ``evicted`` chunks made a change
    true."""

    tier: str
    default: int | None
    owners: tuple[Owner, ...]
    others_held: int
    others_over_quota: int
    evicted: int = 0


class PinState(msgspec.Struct, frozen=True):
    """``seconds`` are left. ``chunks`` came under the pin, those cleared meanwhile included."""

    name: str
    salt: str
    seconds: float
    chunks: int


class Pins(msgspec.Struct, frozen=True, tag="pins"):
    """``changed`` pins were extended or released."""

    pins: tuple[PinState, ...]
    changed: int = 0


Question = AskStatus | AskClear | AskQuotas | SetQuota | ForgetQuota | AskPins | ExtendPin | ReleasePin
Answer = Status | Cleared | Quotas | Pins
