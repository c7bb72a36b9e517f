"""Frames on the control socket. One packet is one frame, of bounded size, typed, and never code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

WIRE_VERSION = 1
MAXIMUM_FRAME_BYTES = 1 << 16
MAXIMUM_ROWS = 500
"""Operations in one request to write."""
MAXIMUM_NAME_BYTES = 1024
_ROW_WORDS = 7

_Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Export(msgspec.Struct, frozen=True, array_like=True, tag="kvferry-local"):
    """What a peer needs to find us: ``address`` is an abstract name of a Unix socket."""

    version: int
    address: _Token
    epoch: bytes
    instance: _Text
    rank: _Word
    boot: _Text


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Who connects, and which epoch it wants. ``probe`` lies at ``probe_address`` in its memory. With it
    comes the descriptor of its generations."""

    version: int
    epoch: bytes
    instance: _Text
    rank: _Word
    wanted: bytes
    probe: _Token
    probe_address: _Word


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The answer, likewise with a descriptor. ``now`` is the monotonic clock, in seconds."""

    epoch: bytes
    probe: _Token
    probe_address: _Word
    now: float


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The other answer; ``kind`` is the value of an error kind."""

    kind: _Text
    why: _Text


class Announce(msgspec.Struct, frozen=True, array_like=True, tag="announce"):
    """A region is registered. With it comes the descriptor of its memory file, if ``in_file`` is not -1:
    from there on the file holds the region's bytes."""

    name: _Text
    kind: _Text
    length: _Word
    address: _Word
    slot: _Word
    generation: _Word
    in_file: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag="withdraw"):
    """A region was taken back."""

    slot: _Word
    generation: _Word


class Listed(msgspec.Struct, frozen=True, array_like=True, tag="listed"):
    """All regions there were at the hello have been announced."""


class Sync(msgspec.Struct, frozen=True, array_like=True, tag="sync"):
    """Asks for :class:`Synced`, in front of which lies whatever the peer announced earlier."""

    number: _Word


class Synced(msgspec.Struct, frozen=True, array_like=True, tag="synced"):
    number: _Word


class WriteRequest(msgspec.Struct, frozen=True, array_like=True, tag="write"):
    """Copy from my memory into yours. ``deadline`` is a time of the receiver's monotonic clock."""

    number: _Word
    deadline: float
    rows: Annotated[bytes, msgspec.Meta(max_length=MAXIMUM_ROWS * _ROW_WORDS * 8)]


class WriteStop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Nobody waits for the answer any more."""

    number: _Word


class Written(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """The answer: rows that failed, each with a place in ``reasons`` (kind and why). The rest is done."""

    number: _Word
    failed: list[tuple[_Word, _Word]]
    reasons: list[tuple[_Text, _Text]]


Frame = (
    Hello
    | Welcome
    | Refused
    | Announce
    | Withdraw
    | Listed
    | Sync
    | Synced
    | WriteRequest
    | WriteStop
    | Written
)


class Row(msgspec.Struct, frozen=True):
    """One write: from the writer's region in ``source_slot`` into the owner's in ``slot``."""

    slot: int
    generation: int
    offset: int
    source_slot: int
    source_generation: int
    source_offset: int
    length: int


class Codec:
    """Frames to bytes and back. Threads: any."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._frame: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Frame)
        self._export = msgspec.msgpack.Decoder(Export)

    def encode(self, frame: Frame | Export) -> bytes:
        return self._encode(frame)

    def frame(self, data: bytes) -> Frame:
        """Raises ``msgspec.DecodeError`` for anything that is no frame."""
        found: Frame = self._frame.decode(data)
        return found

    def export(self, data: bytes) -> Export:
        """Raises ``msgspec.DecodeError`` for anything that is no export."""
        return self._export.decode(data)


def pack_rows(rows: Sequence[tuple[int, ...]]) -> bytes:
    return np.array(rows, dtype="<u8").tobytes()


def unpack_rows(data: bytes) -> list[Row]:
    """Raises ``ValueError`` when it is not a whole number of rows."""
    if len(data) % (_ROW_WORDS * 8):
        raise ValueError("it sent half a row")
    return [Row(*row) for row in np.frombuffer(data, dtype="<u8").reshape(-1, _ROW_WORDS).tolist()]
