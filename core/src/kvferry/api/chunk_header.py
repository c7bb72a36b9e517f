"""What must be known of a chunk to find it again, and its one form as bytes."""

from __future__ import annotations

import struct
import zlib

from attrs import frozen

from kvferry.api.errors import ErrorKind, KVFerryError
from kvferry.api.keys import DIGEST_BYTES, ChunkKey

_MAGIC = b"kvferryC"
_VERSION = 2
_FRAME = struct.Struct("<8sII")  # magic, version, length of all up to the checksum
_FIXED = struct.Struct("<64s?32sIIQdIII")  # key, parent, depth, tokens, size, end, counts of what follows
_ALIAS = struct.Struct("<32sI")
_CHECKSUM = struct.Struct("<I")


@frozen(kw_only=True)
class ChunkHeader:
    """The facts of one chunk. They stand beside its bytes in every store that outlives a process.

    Raises ``ValueError`` for facts that no chunk can have.
    """

    key: ChunkKey
    parent: bytes | None
    """Digest of the full chunk before it; ``None`` at depth 0."""
    depth: int
    """Chunks before it in its prompt."""
    tokens: int
    size: int
    """Bytes of the value."""
    owner: str = ""
    """Cache salt of the requests that may hit it; any text."""
    model: str = ""
    """Label of the model, for people. Identity is in the key."""
    aliases: tuple[tuple[bytes, int], ...] = ()
    """Digests of its beginnings, and how many tokens each holds."""
    expires: float = 0.0
    """When its time to live ends, in seconds since 1970; 0 is never. Whoever finds it later minds that."""

    def __attrs_post_init__(self) -> None:
        self.key.to_bytes()
        wrong = self.parent is not None and len(self.parent) != DIGEST_BYTES
        for alias, _ in self.aliases:  # a restart makes millions of these: no generator, no list
            if len(alias) != DIGEST_BYTES:
                wrong = True
        if wrong:
            raise ValueError(f"a digest has not {DIGEST_BYTES} bytes: {self!r}")
        if (
            not self.expires >= 0
            or self.size < 1
            or self.tokens < 1
            or self.depth < 0
            or (self.parent is None) != (self.depth == 0)
        ):
            raise ValueError(f"no chunk has such a header: {self!r}")

    def to_bytes(self) -> bytes:
        """A form for disks and wires that ends with a checksum of itself. Its length varies."""
        owner = self.owner.encode("utf-8", "surrogatepass")
        model = self.model.encode("utf-8", "surrogatepass")
        body = _FIXED.pack(
            self.key.to_bytes(),
            self.parent is not None,
            self.parent or bytes(DIGEST_BYTES),
            self.depth,
            self.tokens,
            self.size,
            self.expires,
            len(owner),
            len(model),
            len(self.aliases),
        )
        body += owner + model + b"".join(_ALIAS.pack(*alias) for alias in self.aliases)
        raw = _FRAME.pack(_MAGIC, _VERSION, _FRAME.size + len(body)) + body
        return raw + _CHECKSUM.pack(zlib.crc32(raw))

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview) -> tuple[ChunkHeader, int]:
        """Inverse of :meth:`to_bytes`, for bytes that begin with a header: the header and its length.

        Raises :class:`KVFerryError` (``INTEGRITY``) for anything else, whatever it is.
        """
        try:
            return _decode(bytes(raw))
        except (struct.error, ValueError) as error:
            raise KVFerryError(
                "these bytes do not begin with a chunk's header",
                kind=ErrorKind.INTEGRITY,
                why=str(error),
                remedy="delete the chunk; it will be computed and stored again",
            ) from error


def _decode(raw: bytes) -> tuple[ChunkHeader, int]:
    magic, version, length = _FRAME.unpack_from(raw)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError(f"it is marked {magic!r}, version {version}")
    (checksum,) = _CHECKSUM.unpack_from(raw, length)
    if zlib.crc32(raw[:length]) != checksum:
        raise ValueError("its checksum differs")
    at = _FRAME.size
    key, has_parent, parent, depth, tokens, size, expires, owner, model, aliases = _FIXED.unpack_from(raw, at)
    at += _FIXED.size
    behind = at + owner + model
    header = ChunkHeader(
        key=ChunkKey.from_bytes(key),
        parent=parent if has_parent else None,
        depth=depth,
        tokens=tokens,
        size=size,
        owner=raw[at : at + owner].decode("utf-8", "surrogatepass"),
        model=raw[at + owner : at + owner + model].decode("utf-8", "surrogatepass"),
        aliases=tuple(_ALIAS.iter_unpack(raw[behind : behind + _ALIAS.size * aliases])),
        expires=expires,
    )
    return header, length + _CHECKSUM.size
