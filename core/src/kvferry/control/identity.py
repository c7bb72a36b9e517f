"""Declared identity: what chunks must agree on before their tokens are even looked at."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from attrs import field, frozen

from kvferry.api import DIGEST_BYTES, KEY_FORMAT_VERSION, ErrorKind, KVFerryError, KVGeometry, Retry
from kvferry.control.canonical import encode

# Each kind of message starts with a mark of its own, so that no message of one kind can be one of
# another.
_NAMESPACE_MARK = b"kvferryN"


@frozen(kw_only=True)
class ChunkHash:
    """A cryptographic hash and the name under which it enters the namespace.

    ``digest`` maps bytes to 32 bytes, may be called from any thread, and must depend on nothing
    but its argument.
    """

    name: str
    digest: Callable[[bytes], bytes] = field(eq=False, repr=False)


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


SHA256 = ChunkHash(name="sha256", digest=_sha256)
"""The default. Why this one: ``docs/decisions/0001-chunk-keys.md``."""


@frozen(kw_only=True)
class LoRAIdentity:
    """An adapter. ``version`` must change whenever the weights behind ``name`` do, for example the
    path or the checksum of the adapter's files."""

    name: str
    version: str


@frozen(kw_only=True)
class Namespace:
    """Everything that must be equal before two instances may find each other's chunks.

    ``model`` and ``revision`` identify the weights and whatever else changes the KV values of one
    token sequence. Raises :class:`kvferry.api.KVFerryError` (``CONFIG``) for an empty model name or
    a geometry without chunks. Immutable; any thread.
    """

    model: str
    revision: str
    geometry: KVGeometry
    hash: ChunkHash = SHA256
    digest: bytes = field(init=False, repr=False, eq=False)
    """32 bytes; first half of every :class:`kvferry.api.ChunkKey`."""

    @digest.default
    def _compute_digest(self) -> bytes:
        if not self.model:
            raise _refused("the model has no name", "give the model's name or path")
        if self.geometry.chunk_tokens < 1:
            raise _refused(
                f"a chunk cannot hold {self.geometry.chunk_tokens} tokens",
                "set chunk_tokens to a whole number of the engine's blocks",
            )
        declared = (KEY_FORMAT_VERSION, self.model, self.revision, self.geometry, self.hash.name)
        digest = self.hash.digest(_NAMESPACE_MARK + encode(declared))
        if len(digest) != DIGEST_BYTES:
            raise _refused(
                f"the hash {self.hash.name} gives {len(digest)} bytes, not {DIGEST_BYTES}",
                f"use a hash with {DIGEST_BYTES} bytes",
            )
        return digest


def _refused(what: str, remedy: str) -> KVFerryError:
    return KVFerryError(
        what,
        kind=ErrorKind.CONFIG,
        where="key namespace",
        remedy=remedy,
        retry=Retry.AFTER_CHANGE,
    )
