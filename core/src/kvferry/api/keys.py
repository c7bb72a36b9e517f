"""Identity of KV data: geometry, layout, namespace and chunk keys.

Keys are derived from content and declared identity alone. Python's ``hash()`` and
``PYTHONHASHSEED`` never take part.
"""

from __future__ import annotations

import base64
from typing import NamedTuple

from attrs import frozen

DIGEST_BYTES = 32
KEY_FORMAT_VERSION = 1

_TEXT_LENGTH = 105  # two halves of 52 characters and the full stop


@frozen(kw_only=True)
class GroupGeometry:
    """One KV cache group of the whole model, before any parallel split.

    ``kind`` is ``full`` (full attention), ``sliding`` (tokens attend to ``window`` tokens, themselves
    included), ``mla`` (one latent instead of K and V; ``kv_heads`` is 1) or ``state``.
    """

    kind: str
    layers: int
    kv_heads: int
    head_size: int
    dtype: str
    window: int | None = None


@frozen(kw_only=True)
class KVGeometry:
    """The model's global KV shape. Part of the namespace."""

    groups: tuple[GroupGeometry, ...]
    chunk_tokens: int


@frozen(kw_only=True)
class ShardLayout:
    """One rank's share of the KV cache and how it is arranged.

    Compared between peers; never part of a key. Per group ``g``: a block has ``block_tokens[g]`` tokens,
    ``page_bytes[g]`` is the size of one block of one layer on this rank, ``layers[g]`` how many layers
    of the group live here. ``replicated[g]`` says that every tensor-parallel rank holds the same bytes,
    like MLA's latents, not a share of the heads.
    """

    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    arrangement: str
    """``fused`` (K and V in one page, or a latent) or ``split`` (separate K and V pages)."""
    block_tokens: tuple[int, ...]
    page_bytes: tuple[int, ...]
    layers: tuple[int, ...]
    replicated: tuple[bool, ...]


class ChunkKey(NamedTuple):
    """Full identity of a chunk: where it may be found (namespace) and what it holds (digest).

    Both halves are 32 bytes. A tuple of bytes, because a cache holds millions of keys and the
    garbage collector need not look into bytes.
    """

    namespace: bytes
    digest: bytes

    def to_bytes(self) -> bytes:
        """64 bytes, the namespace first. Injective: both halves have a fixed length.

        Raises ``ValueError`` when a half has another length: such keys could share one form.
        """
        if len(self.namespace) != DIGEST_BYTES or len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"both halves of a chunk key have {DIGEST_BYTES} bytes: {self!r}")
        return self.namespace + self.digest

    @classmethod
    def from_bytes(cls, raw: bytes) -> ChunkKey:
        """Inverse of :meth:`to_bytes`. Raises ``ValueError`` for any other length."""
        if len(raw) != 2 * DIGEST_BYTES:
            raise ValueError(f"a chunk key has {2 * DIGEST_BYTES} bytes, not {len(raw)}")
        return cls(raw[:DIGEST_BYTES], raw[DIGEST_BYTES:])

    def to_text(self) -> str:
        """105 characters of ``a-z2-7.``: safe as one file name on any file system.

        Lower-case base32 of each half without padding, joined by a full stop, so that names stay
        distinct on file systems that fold case. Raises ``ValueError`` like :meth:`to_bytes`.
        """
        self.to_bytes()
        return f"{_base32(self.namespace)}.{_base32(self.digest)}"

    @classmethod
    def from_text(cls, text: str) -> ChunkKey:
        """Inverse of :meth:`to_text`. Raises ``ValueError`` for text that it cannot have made."""
        namespace, dot, digest = text.partition(".")
        if not dot or len(text) != _TEXT_LENGTH:
            raise ValueError(f"not a chunk key: {text[: 2 * _TEXT_LENGTH]!r}")
        key = cls(_unbase32(namespace), _unbase32(digest))
        if key.to_text() != text:  # upper case, or bits beyond the last byte
            raise ValueError(f"not a chunk key: {text!r}")
        return key


def _base32(raw: bytes) -> str:
    return base64.b32encode(raw).decode("ascii").rstrip("=").lower()


def _unbase32(text: str) -> bytes:
    try:
        return base64.b32decode(text.upper() + "=" * (-len(text) % 8))
    except ValueError as error:
        raise ValueError(f"not base32: {text!r}") from error
