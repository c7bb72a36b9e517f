"""Messages between instances and the directory.

Encoded as MessagePack by msgspec: typed, bounded, and never code. Every message that may be the first of its
sender carries ``version``; in whatever version of these messages, it stays a field of that name.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvferry.api import DIGEST_BYTES
from kvferry_sharing_p2p.directory.answers import (
    DirectoryStatus,
    Found,
    Progress,
    Refusal,
    Registration,
    Stranger,
)
from kvferry_sharing_p2p.frames import Dialect, FrameReader

WIRE_VERSION: Final = 1
MAXIMUM_KEYS: Final = 16384
"""Keys in one message."""
MAXIMUM_ADDRESS_BYTES: Final = 65536
MAXIMUM_FRAME_BYTES: Final = 1 << 20
"""Longer frames are refused unread, by both sides."""
EPOCH_BYTES: Final = 16
SESSION_BYTES: Final = 24
MAXIMUM_HOLDERS: Final = 8
MAXIMUM_RANKS: Final = 4096

_Sequence = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
_Name = Annotated[str, Meta(min_length=1, max_length=255)]
_Epoch = Annotated[bytes, Meta(min_length=EPOCH_BYTES, max_length=EPOCH_BYTES)]
_Session = Annotated[bytes, Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
_Namespace = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Digests = Annotated[bytes, Meta(max_length=MAXIMUM_KEYS * DIGEST_BYTES)]


def _check(digests: bytes) -> None:
    if len(digests) % DIGEST_BYTES:
        raise ValueError(f"{len(digests)} bytes are not whole digests of {DIGEST_BYTES} bytes")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """An instance wants to register. The answer repeats ``epoch`` and ``attempt``."""

    version: int
    attempt: _Sequence
    instance: _Name
    epoch: _Epoch
    namespace: _Namespace
    ranks: Annotated[int, Meta(ge=1, le=MAXIMUM_RANKS)]
    address: Annotated[bytes, Meta(max_length=MAXIMUM_ADDRESS_BYTES)]


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The instance lives, and has sent messages up to ``sequence``."""

    session: _Session
    sequence: _Sequence


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The instance ends in order. Not answered."""

    session: _Session


class BeginAll(msgspec.Struct, frozen=True, tag="begin-all"):
    """From here on all keys are told anew."""

    session: _Session
    sequence: _Sequence


class SomeOfAll(msgspec.Struct, frozen=True, tag="some-of-all"):
    """Some of all keys, one digest behind the other."""

    session: _Session
    sequence: _Sequence
    digests: _Digests

    def __post_init__(self) -> None:
        _check(self.digests)


class EndAll(msgspec.Struct, frozen=True, tag="end-all"):
    """All keys have been told."""

    session: _Session
    sequence: _Sequence


class Changes(msgspec.Struct, frozen=True, tag="changes"):
    """Keys that came and, after that, keys that went."""

    session: _Session
    sequence: _Sequence
    added: _Digests
    removed: _Digests

    def __post_init__(self) -> None:
        _check(self.added)
        _check(self.removed)
        if len(self.added) + len(self.removed) > MAXIMUM_KEYS * DIGEST_BYTES:
            raise ValueError(f"there are more than {MAXIMUM_KEYS} keys")


class Find(msgspec.Struct, frozen=True, tag="find"):
    """Who has the longest beginning of ``digests``, other than ``asker``? The answer repeats ``id``."""

    version: int
    id: _Sequence
    asker: _Name
    namespace: _Namespace
    digests: _Digests
    limit: Annotated[int, Meta(ge=1, le=MAXIMUM_HOLDERS)] = 1

    def __post_init__(self) -> None:
        _check(self.digests)


class AskStatus(msgspec.Struct, frozen=True, tag="ask-status"):
    """How do things stand?"""

    version: int


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """Answer to the hello of that attempt: the instance is registered."""

    epoch: _Epoch
    attempt: _Sequence
    registration: Registration


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Answer to the hello of that attempt: it is not."""

    epoch: _Epoch
    attempt: _Sequence
    refusal: Refusal


class Followed(msgspec.Struct, frozen=True, tag="followed"):
    """Answer to a beat, to a part of everything, and to changes."""

    progress: Progress


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """Answer to the same from a session that is not known."""

    stranger: Stranger


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Answer to the find of that id."""

    id: _Sequence
    found: Found


class Status(msgspec.Struct, frozen=True, tag="status"):
    """How things stand."""

    status: DirectoryStatus
    rejected: int = 0
    """Frames that were no messages, since the directory started."""


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """Answer to a frame that is no message of this ``version``; ``reason`` is one sentence."""

    version: int
    reason: str


ToDirectory = Hello | Beat | Bye | BeginAll | SomeOfAll | EndAll | Changes | Find | AskStatus
FromDirectory = Accepted | Refused | Followed | Unknown | Answer | Status | Rejected

_DIALECT: Final = Dialect(
    version=WIRE_VERSION,
    most_bytes=MAXIMUM_FRAME_BYTES,
    sides="the directory and its instances",
    of="the directory",
)


class Codec:
    """Between messages and frames. Keeps nothing of either. Reading raises as
    :meth:`kvferry_sharing_p2p.frames.FrameReader.read` does. Threads: one at a time."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._to_directory: FrameReader[ToDirectory] = FrameReader(_DIALECT, ToDirectory)
        self._from_directory: FrameReader[FromDirectory] = FrameReader(_DIALECT, FromDirectory)

    def encode(self, message: ToDirectory | FromDirectory) -> bytes:
        """The frame of a message."""
        return self._encoder.encode(message)

    def read_to_directory(self, frame: bytes, where: str) -> ToDirectory:
        """What an instance or an operator has sent."""
        return self._to_directory.read(frame, where)

    def read_from_directory(self, frame: bytes, where: str) -> FromDirectory:
        """What the directory has answered."""
        return self._from_directory.read(frame, where)
