"""Messages of the side channel between a scheduler and its workers.

Encoded as MessagePack by msgspec: typed, bounded, and never code. Every message of a worker carries
its rank and epoch, so that a message of an earlier life is recognised.
"""

from __future__ import annotations

import msgspec

from kvferry.data.plans import TransferResult

WIRE_VERSION = 2
MAXIMUM_MESSAGE_BYTES = 16 << 20


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker introduces itself. ``fingerprint`` must equal the scheduler's own."""

    version: int
    token: str
    rank: int
    world_size: int
    epoch: int
    fingerprint: str
    slots: int
    slot_bytes: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """``slots`` slots from the start of the arena may be used now."""

    rank: int
    epoch: int
    slots: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Outcomes of transfers."""

    rank: int
    epoch: int
    results: tuple[TransferResult, ...]


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The worker lives."""

    rank: int
    epoch: int


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The worker ends in order: it copies nothing any more."""

    rank: int
    epoch: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The scheduler accepted the hello."""

    epoch: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The scheduler did not accept the hello; the worker stays without a cache."""

    reason: str


class SayHello(msgspec.Struct, frozen=True, tag="say-hello"):
    """The scheduler does not know the sender: it should introduce itself again."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """An operator's question, encoded; ``version`` says how. The form of this message never changes."""

    version: int
    token: str
    question: msgspec.Raw


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The answer, encoded, or why there is none. The form of this message never changes."""

    version: int
    refused: str = ""
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")


FromWorker = Hello | Ready | Done | Beat | Bye
ToWorker = Welcome | Refused | SayHello
