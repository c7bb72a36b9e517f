"""Messages between the schedulers of two instances.

Encoded as MessagePack by msgspec: typed, bounded, and never code. A hello comes first and carries
``version``; in whatever version of these messages, it stays a field of that name.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvferry.api import DIGEST_BYTES, MAX_EXPORT_BYTES, Refusal
from kvferry_sharing_p2p.frames import Dialect, FrameReader

WIRE_VERSION: Final = 2
MAXIMUM_KEYS: Final = 65536
"""Keys of one prompt: 16 million tokens at 256 each."""
MAXIMUM_FRAME_BYTES: Final = 16 << 20
"""Longer frames are refused unread, by both sides."""
MAXIMUM_ALIASES: Final = 1024
EPOCH_BYTES: Final = 16
MOST_REASON: Final = 1024
"""Letters of what is told to people."""
MAXIMUM_RANKS: Final = 4096

_Number = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
_Count = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
_Name = Annotated[str, Meta(min_length=1, max_length=255)]
_Epoch = Annotated[bytes, Meta(min_length=EPOCH_BYTES, max_length=EPOCH_BYTES)]
_Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Export = Annotated[bytes, Meta(max_length=MAX_EXPORT_BYTES)]
_Alias = tuple[_Digest, _Count]
_Aliases = Annotated[tuple[_Alias, ...], Meta(max_length=MAXIMUM_ALIASES)]
_Seconds = Annotated[float, Meta(ge=0)]


class Rank(msgspec.Struct, frozen=True):
    """One rank of an instance. ``shard`` is the digest of what it holds of the KV cache and how that is
    arranged; ``export`` is that of its channel."""

    shard: Annotated[bytes, Meta(max_length=64)]
    slot_bytes: _Count
    export: _Export


class Card(msgspec.Struct, frozen=True):
    """Who an instance is, and all in which two must be alike before one reads from the other."""

    instance: _Name
    epoch: _Epoch
    namespace: _Digest
    chunk_tokens: _Count
    block_tokens: _Count
    channel: _Name
    """What the channel is called that its workers have open."""
    ranks: Annotated[tuple[Rank, ...], Meta(min_length=1, max_length=MAXIMUM_RANKS)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of an asker. ``to`` is the epoch of the one that it means."""

    version: int
    to: _Epoch
    card: Card


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Both are alike."""

    card: Card


class Unwelcome(msgspec.Struct, frozen=True, tag="unwelcome"):
    """They are not, or this is another life of the instance: ``rule`` is the id of what is broken."""

    rule: Annotated[str, Meta(max_length=32)]
    reason: Annotated[str, Meta(max_length=MOST_REASON)]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """See :class:`kvferry.api.PeerAsk`. ``keys`` are digests one behind the other."""

    number: _Number
    keys: Annotated[bytes, Meta(max_length=MAXIMUM_KEYS * DIGEST_BYTES)]
    tails: _Aliases
    skip: Annotated[int, Meta(ge=0, le=MAXIMUM_KEYS)]
    limit_tokens: _Number

    def __post_init__(self) -> None:
        if len(self.keys) % DIGEST_BYTES:
            raise ValueError(f"{len(self.keys)} bytes are not whole digests of {DIGEST_BYTES} bytes")


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """See :class:`kvferry.api.LentChunk`. ``seconds`` is ``None`` for a chunk that does not expire."""

    digest: _Digest
    parent: _Digest | None
    depth: Annotated[int, Meta(ge=0, le=MAXIMUM_KEYS)]
    tokens: _Count
    aliases: _Aliases
    model: Annotated[str, Meta(max_length=4096)]
    seconds: _Seconds | None
    slot: _Number


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """See :class:`kvferry.api.Grant`."""

    number: _Number
    chunks: Annotated[tuple[Lent, ...], Meta(min_length=1, max_length=MAXIMUM_KEYS + 1)]
    tokens: _Number
    seconds: _Seconds
    region: _Name


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """See :class:`kvferry.api.Refused`."""

    number: _Number
    reason: Refusal


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Let a grant last on. The answer repeats ``turn``."""

    number: _Number
    turn: _Number


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    """So long it lasts from the moment of the answer on; 0 if it has ended."""

    number: _Number
    turn: _Number
    seconds: _Seconds


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Nothing is read under this number any more, or ever will be."""

    number: _Number


class Stranger(msgspec.Struct, frozen=True, tag="stranger"):
    """Who was asked does not know who asks, perhaps because it has started anew: a hello comes first."""


ToHolder = Hello | Ask | Renew | Done
ToAsker = Welcome | Unwelcome | Granted | Declined | Renewed | Stranger

_DIALECT: Final = Dialect(
    version=WIRE_VERSION, most_bytes=MAXIMUM_FRAME_BYTES, sides="the two instances", of="a peer"
)


class Codec:
    """Between messages and frames. Keeps nothing of either. Reading raises as
    :meth:`kvferry_sharing_p2p.frames.FrameReader.read` does. Threads: one at a time."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._to_holder: FrameReader[ToHolder] = FrameReader(_DIALECT, ToHolder)
        self._to_asker: FrameReader[ToAsker] = FrameReader(_DIALECT, ToAsker)

    def encode(self, message: ToHolder | ToAsker) -> bytes:
        """The frame of a message."""
        return self._encoder.encode(message)

    def read_to_holder(self, frame: bytes, where: str) -> ToHolder:
        """What somebody asks of us."""
        return self._to_holder.read(frame, where)

    def read_to_asker(self, frame: bytes, where: str) -> ToAsker:
        """What a holder has answered."""
        return self._to_asker.read(frame, where)
