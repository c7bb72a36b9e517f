"""The wire protocol: what a frame looks like, and what is refused before anything is allocated.

The page on the TCP channel describes it for people. Every frame is a header of fixed size, then a body of
``body`` bytes, then ``data`` bytes that go straight between a socket and registered memory.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from attrs import frozen

WIRE_VERSION = 1
MAGIC = b"KVFT"
MAX_PIECES = 1000
"""In one frame: with the header and the body below the 1,024 parts that one system call takes."""
MAX_BODY_BYTES = 128 << 10
MAX_DATA_BYTES = 64 << 20
MAX_NAME_BYTES = 1024
"""Of a region, an instance or a reason, in UTF-8."""
NONCE_BYTES = 32
PROOF_BYTES = 32
CONNECTION_BYTES = 16


class Kind(enum.IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    REGION = 6
    """A region is registered."""
    GONE = 7
    """A region is not registered any more."""
    TIME = 8
    """Nothing but the sender's time, with which the list of regions ends, and which comes regularly."""
    READ = 9
    DATA = 10
    """Answers ``READ``."""
    WRITE = 11
    WRITTEN = 12
    """Answers ``WRITE``."""
    RECEIPT = 13
    """The answer was dealt with: whoever sent it need not keep the regions for it any longer."""


_BODY_LIMITS = {
    Kind.HELLO: 4 * MAX_NAME_BYTES,
    Kind.CHALLENGE: NONCE_BYTES,
    Kind.PROOF: PROOF_BYTES,
    Kind.WELCOME: PROOF_BYTES,
    Kind.REFUSED: MAX_NAME_BYTES,
    Kind.REGION: MAX_NAME_BYTES,
    Kind.GONE: MAX_NAME_BYTES,
    Kind.TIME: 0,
    Kind.READ: MAX_BODY_BYTES,
    Kind.DATA: MAX_PIECES,
    Kind.WRITE: MAX_BODY_BYTES,
    Kind.WRITTEN: MAX_PIECES,
    Kind.RECEIPT: 0,
}
_WITH_DATA = frozenset((Kind.DATA, Kind.WRITE))
_WITH_PIECES = frozenset((Kind.READ, Kind.DATA, Kind.WRITE, Kind.WRITTEN))
_WITHOUT = frozenset((Kind.HELLO, Kind.PROOF, Kind.WELCOME, Kind.REGION, Kind.GONE, Kind.TIME, Kind.RECEIPT))


class WireError(ValueError):
    """Bytes that are no frame of this protocol. The connection they came from has to end."""


class PieceStatus(enum.IntEnum):
    """What the owner of the memory says of one piece."""

    DONE = 0
    OUTSIDE = 1
    """It lies outside of the region, or there is no such region."""
    LATE = 2
    """Its deadline was over."""


class Refusal(enum.IntEnum):
    """Why somebody may not connect."""

    VERSION = 1
    EPOCH = 2
    NO_SECRET_HERE = 3
    NO_SECRET_THERE = 4
    WRONG_SECRET = 5
    BUSY = 6
    UNKNOWN_CONNECTION = 7


class Role(enum.IntEnum):
    """What one TCP connection is for."""

    CONTROL = 1
    """Tells about regions, and ends when one side does."""
    LANE = 2
    """Carries bytes."""


_HEADER = struct.Struct("<4sBBHIIQQ")
HEADER_BYTES = _HEADER.size


class Header(NamedTuple):
    """The first 32 bytes of a frame."""

    kind: Kind
    pieces: int = 0
    """How many, in requests and answers. ``CHALLENGE``: 1 with a secret. ``REFUSED``: the reason."""
    body: int = 0
    """Bytes of the body."""
    data: int = 0
    """Bytes behind the body; in ``READ`` those that are asked for, which come with the answer."""
    number: int = 0
    """Which request this is, or answers; chosen by who asks. ``REGION``: its length."""
    time: int = 0
    """Microseconds of the owner's clock: in requests their deadline, in answers the moment."""

    def to_bytes(self) -> bytes:
        return _HEADER.pack(
            MAGIC, WIRE_VERSION, self.kind, self.pieces, self.body, self.data, self.number, self.time
        )


def decode_header(data: bytes | bytearray | memoryview, *, any_version: bool = False) -> Header:
    """The header in ``HEADER_BYTES`` bytes. Raises :class:`WireError` for anything that is none, among it
    lengths above their limits, and another version unless :func:`version_of` is looked at elsewhere."""
    magic, version, number_of_kind, count, body, length, number, time = _HEADER.unpack(data)
    if magic != MAGIC:
        raise WireError("it does not begin as a frame")
    if version != WIRE_VERSION and not any_version:
        raise WireError(f"it has the wire version {version}")
    try:
        kind = Kind(number_of_kind)
    except ValueError:
        raise WireError(f"there is no kind {number_of_kind}") from None
    if body > _BODY_LIMITS[kind]:
        raise WireError(f"{kind.name} has a body of {body} bytes, above {_BODY_LIMITS[kind]}")
    if length > (MAX_DATA_BYTES if kind in _WITH_DATA or kind is Kind.READ else 0):
        raise WireError(f"{kind.name} announces {length} bytes of data")
    if kind in _WITH_PIECES and not 0 < count <= MAX_PIECES:
        raise WireError(f"{kind.name} has {count} pieces")
    if kind in _WITHOUT and count:
        raise WireError(f"{kind.name} has pieces")
    return Header(kind, count, body, length, number, time)


def version_of(data: bytes | bytearray | memoryview) -> int:
    """The wire version in the bytes of a header."""
    return int(data[4])


# -- pieces ------------------------------------------------------------------------------------------

_PIECE = struct.Struct("<IIQ")
_COUNT = struct.Struct("<H")
PIECE_BYTES = _PIECE.size
NAME_OVERHEAD_BYTES = _COUNT.size


class RemotePiece(NamedTuple):
    """``length`` bytes of the owner's region ``region``, from ``offset`` on."""

    region: str
    offset: int
    length: int


def encode_pieces(pieces: Sequence[RemotePiece]) -> bytes:
    """The body of ``READ`` and ``WRITE``: the names of regions, each once, then the pieces."""
    numbers: dict[str, int] = {}
    rows = [
        _PIECE.pack(numbers.setdefault(piece.region, len(numbers)), piece.length, piece.offset)
        for piece in pieces
    ]
    names = [name.encode() for name in numbers]
    table = [part for name in names for part in (_COUNT.pack(len(name)), name)]
    return b"".join((_COUNT.pack(len(names)), *table, *rows))


def decode_pieces(header: Header, body: bytes | bytearray | memoryview) -> list[RemotePiece]:
    """Inverse of :func:`encode_pieces`. Raises :class:`WireError` for a body that is none, or that does not
    fit to the header."""
    names, at = _decode_names(body)
    if len(body) - at != header.pieces * _PIECE.size:
        raise WireError(f"{header.pieces} pieces do not have {len(body) - at} bytes")
    try:
        pieces = [
            RemotePiece(names[number], offset, length)
            for number, length, offset in _PIECE.iter_unpack(memoryview(body)[at:])
        ]
    except IndexError:
        raise WireError("a piece names a region that is not in the frame's list") from None
    if sum(piece.length for piece in pieces) != header.data:
        raise WireError(f"the pieces together do not have {header.data} bytes")
    return pieces


def _decode_names(body: bytes | bytearray | memoryview) -> tuple[list[str], int]:
    try:
        (count,) = _COUNT.unpack_from(body)
        at, names = _COUNT.size, []
        for _ in range(count):
            (length,) = _COUNT.unpack_from(body, at)
            at += _COUNT.size
            if length > min(MAX_NAME_BYTES, len(body) - at):
                raise WireError(f"a name of {length} bytes does not fit")
            names.append(bytes(body[at : at + length]).decode())
            at += length
    except (struct.error, UnicodeDecodeError):
        raise WireError("the list of regions is cut or no text") from None
    return names, at


def decode_statuses(count: int, body: bytes | bytearray | memoryview) -> list[PieceStatus]:
    """What became of ``count`` pieces: the body of an answer, which is empty when all are done."""
    if not body:
        return [PieceStatus.DONE] * count
    if len(body) != count:
        raise WireError(f"{len(body)} results answer {count} pieces")
    try:
        return [PieceStatus(status) for status in bytes(body)]
    except ValueError:
        raise WireError("a result has a value that there is not") from None


def decode_name(body: bytes | bytearray | memoryview) -> str:
    """A body that is one text."""
    try:
        return bytes(body).decode()
    except UnicodeDecodeError:
        raise WireError("a name is no text") from None


# -- the opening -------------------------------------------------------------------------------------

_HELLO = struct.Struct("<BB32s16s16s16sII")
_WITH_SECRET = 1


@frozen(kw_only=True)
class Hello:
    """The first words of whoever connects."""

    role: Role
    secret: bool
    """Whether a secret is set there."""
    nonce: bytes
    connection: bytes
    """16 bytes that all TCP connections of one connection share."""
    wanted_epoch: bytes
    """Whom it means to reach."""
    epoch: bytes
    rank: int
    instance: str

    def to_bytes(self) -> bytes:
        name = self.instance.encode()[:MAX_NAME_BYTES].decode(errors="ignore").encode()
        flags = _WITH_SECRET if self.secret else 0
        head = _HELLO.pack(
            self.role,
            flags,
            self.nonce,
            self.connection,
            self.wanted_epoch,
            self.epoch,
            self.rank,
            len(name),
        )
        return head + name

    @classmethod
    def parse(cls, body: bytes) -> Hello:
        """Inverse of :meth:`to_bytes`. Raises :class:`WireError` for anything else."""
        try:
            role, flags, nonce, connection, wanted, epoch, rank, length = _HELLO.unpack_from(body)
        except struct.error:
            raise WireError("a hello is cut") from None
        name = body[_HELLO.size :]
        if len(name) != length:
            raise WireError("a hello has another length than it says")
        try:
            role = Role(role)
        except ValueError:
            raise WireError(f"a hello has the role {role}") from None
        return cls(
            role=role,
            secret=bool(flags & _WITH_SECRET),
            nonce=nonce,
            connection=connection,
            wanted_epoch=wanted,
            epoch=epoch,
            rank=rank,
            instance=decode_name(name),
        )
