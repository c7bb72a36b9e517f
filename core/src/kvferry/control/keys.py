"""Chunk keys of one request, computed as its tokens become known.

Messages, each hashed by the namespace's hash (numbers are little-endian)::

    namespace  "kvferryN"  canonical(format version, model, revision, geometry, hash name)
    root       "kvferryR"  canonical(namespace digest, LoRA or none, salt)
    chunk      "kvferryC"  parent digest  content
    content    u32 tokens  u32 media items  u32 per token  media items
    media item i64 start relative to the chunk  u64 length  u32 size of identifier  identifier

Every message can be read back unambiguously, so different content gives different bytes. The same
function over fewer tokens gives the digest of a tail.
"""

from __future__ import annotations

import struct
from bisect import insort
from collections.abc import Sequence
from operator import index
from typing import SupportsIndex

from attrs import frozen

from kvferry.api import ErrorKind, KVFerryError
from kvferry.control.canonical import encode
from kvferry.control.chain_cache import ChainCache
from kvferry.control.identity import LoRAIdentity, Namespace
from kvferry.control.tokens import LARGEST_TOKEN, TOKEN_BYTES, TokenPacker, pack_tokens

_ROOT_MARK = b"kvferryR"
_CHUNK_MARK = b"kvferryC"
_CONTENT_HEAD = struct.Struct("<II")
_MEDIA_HEAD = struct.Struct("<qQI")


@frozen(kw_only=True)
class MediaItem:
    """An image, sound or video whose placeholders are the tokens ``start`` to ``start + length``.

    ``identifier`` names the content, the same in every process. ``start`` counts from the beginning
    of the request.
    """

    identifier: str
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class KeyChain:
    """The digests of one request's chunks.

    ``salt`` (empty: none) and ``lora`` (``None``: the base model) have no default: whoever builds
    keys must say which tenant and which weights they are for. ``cache`` is shared by the chains of
    one scheduler. Not safe for several threads. Two chains with equal arguments and equal tokens
    hold equal keys, in every process, however the tokens were cut into calls.
    """

    def __init__(
        self,
        namespace: Namespace,
        *,
        salt: str,
        lora: LoRAIdentity | None,
        pack: TokenPacker = pack_tokens,
        cache: ChainCache | None = None,
    ) -> None:
        """Raises ``TypeError`` when ``salt`` is not a string or ``lora`` not an identity: a salt of
        ``None`` would be a tenant of its own, silently apart from the empty one."""
        if not isinstance(salt, str):
            raise TypeError(f"salt must be a string (empty for none), not {salt!r}")
        if not (lora is None or isinstance(lora, LoRAIdentity)):
            raise TypeError(f"lora must be a LoRAIdentity or None, not {lora!r}")
        self.namespace = namespace
        self.root = namespace.hash.digest(_ROOT_MARK + encode((namespace.digest, lora, salt)))
        """Parent of the first chunk."""
        self.keys: list[bytes] = []
        """Digests of all full chunks so far, head first. Only ``extend`` changes it."""
        self._chunk_tokens = namespace.geometry.chunk_tokens
        self._digest = namespace.hash.digest
        self._plain_head = _CONTENT_HEAD.pack(self._chunk_tokens, 0)
        self._pack = pack
        self._cache = cache
        self._packed = bytearray()
        self._media: dict[int, list[MediaItem]] = {}

    @property
    def tokens(self) -> int:
        """How many tokens the chain holds, those of an incomplete last chunk included."""
        return len(self._packed) // TOKEN_BYTES

    def extend(self, tokens: Sequence[int], *, media: Sequence[MediaItem] = ()) -> None:
        """Append ``tokens``; hash the chunks that they complete.

        Every media item must lie within these tokens; items may overlap, and their order does not
        matter. Raises :class:`kvferry.api.KVFerryError` (``UNSUPPORTED``) for an id outside 0 to
        2**32-1, which no content stands behind, and for an item that does not lie within the
        tokens; the chain is then unchanged.
        """
        before = self.tokens
        packed = self._packed_or_refused(tokens)
        after = before + len(packed) // TOKEN_BYTES
        for item in media:
            if item.length < 1 or item.start < before or item.end > after:
                raise KVFerryError(
                    f"media item {item.identifier!r} covers tokens {item.start} to {item.end}, "
                    f"but the tokens given with it are {before} to {after}",
                    kind=ErrorKind.UNSUPPORTED,
                    where="chunk keys",
                    why="a chunk cannot be named before all that it holds is known",
                    remedy="hand in a media item together with all its placeholder tokens",
                )
        self._packed += packed
        for item in media:
            self._place(item)
        self._link_full_chunks()

    def parent(self, chunk_index: int) -> bytes:
        """Digest before chunk ``chunk_index``: its predecessor's, or the root for chunk 0.

        Raises ``IndexError`` unless all chunks before it are full.
        """
        self._check_index(chunk_index)
        return self.keys[chunk_index - 1] if chunk_index else self.root

    def tail_keys(self, chunk_index: int, block_tokens: int) -> list[tuple[bytes, int]]:
        """Digests of the shorter beginnings of a chunk that end at a block, longest first.

        Pairs of digest and number of tokens (whole blocks, fewer than a chunk, no more than the
        chain holds). Equal content gives an equal digest whether the chunk was cut off there or
        goes on. Works for every full chunk and for the incomplete last one; costs one hash per
        block. Raises ``IndexError`` for a chunk beyond that and ``ValueError`` unless a chunk is a
        whole number of blocks.
        """
        self._check_index(chunk_index)
        if block_tokens < 1 or self._chunk_tokens % block_tokens:
            raise ValueError(
                f"a chunk of {self._chunk_tokens} tokens is not a whole number of blocks "
                f"of {block_tokens} tokens"
            )
        parent = self.parent(chunk_index)
        held = min(self.tokens - chunk_index * self._chunk_tokens, self._chunk_tokens - 1)
        longest = held // block_tokens * block_tokens
        return [
            (self._digest(_CHUNK_MARK + parent + self._content(chunk_index, count)), count)
            for count in range(longest, 0, -block_tokens)
        ]

    def packed_tokens(self, chunk_index: int) -> bytes:
        """The token ids of a full chunk as its key has them: 4 bytes each, little-endian."""
        start = chunk_index * self._chunk_tokens * TOKEN_BYTES
        return bytes(self._packed[start : start + self._chunk_tokens * TOKEN_BYTES])

    def media_in(self, chunk_index: int) -> tuple[MediaItem, ...]:
        """The media items that lie, at least in part, in a chunk, in the order of its key."""
        return tuple(self._media.get(chunk_index, ()))

    def _link_full_chunks(self) -> None:
        keys, cache, digest = self.keys, self._cache, self._digest
        parent = keys[-1] if keys else self.root
        for chunk in range(len(keys), self.tokens // self._chunk_tokens):
            content = self._content(chunk, self._chunk_tokens)
            known = cache.find(parent, content) if cache is not None else None
            if known is None:
                known = digest(_CHUNK_MARK + parent + content)
                if cache is not None:
                    cache.add(parent, content, known)
            parent = known
            keys.append(parent)

    def _content(self, chunk_index: int, count: int) -> bytes:
        """Content of the first ``count`` tokens of a chunk."""
        start = chunk_index * self._chunk_tokens
        packed = self._packed[start * TOKEN_BYTES : (start + count) * TOKEN_BYTES]
        items = self._media.get(chunk_index)
        if items is None:
            full = count == self._chunk_tokens
            return (self._plain_head if full else _CONTENT_HEAD.pack(count, 0)) + packed
        parts: list[bytes | bytearray] = [b"", packed]
        for item in items:
            if item.start < start + count:
                identifier = item.identifier.encode("utf-8", "surrogatepass")
                parts.append(_MEDIA_HEAD.pack(item.start - start, item.length, len(identifier)))
                parts.append(identifier)
        parts[0] = _CONTENT_HEAD.pack(count, len(parts) // 2 - 1)
        return b"".join(parts)

    def _place(self, item: MediaItem) -> None:
        first = item.start // self._chunk_tokens
        last = (item.end - 1) // self._chunk_tokens
        for chunk in range(first, last + 1):
            insort(self._media.setdefault(chunk, []), item, key=_media_order)

    def _packed_or_refused(self, tokens: Sequence[int]) -> bytes:
        if isinstance(tokens, str | bytes | bytearray):
            raise TypeError(f"tokens must be a sequence of ids, not {type(tokens).__name__}")
        count = len(tokens)
        try:
            packed = self._pack(tokens)
        except (OverflowError, TypeError, ValueError) as error:
            raise _unkeyable(tokens, self.tokens) from error
        if len(packed) != TOKEN_BYTES * count:
            raise KVFerryError(
                f"{count} tokens were packed into {len(packed)} bytes",
                kind=ErrorKind.INTERNAL,
                where="chunk keys",
                remedy=f"mend the packer: it owes {TOKEN_BYTES} bytes per token",
            )
        return packed

    def _check_index(self, chunk_index: int) -> None:
        if not 0 <= chunk_index <= len(self.keys):
            raise IndexError(f"chunk {chunk_index} of a chain with {len(self.keys)} full chunks")


def _media_order(item: MediaItem) -> tuple[int, int, str]:
    return (item.start, item.length, item.identifier)


def _unkeyable(tokens: Sequence[int], offset: int) -> KVFerryError:
    for position, token in enumerate(tokens, offset):
        if not (isinstance(token, SupportsIndex) and 0 <= index(token) <= LARGEST_TOKEN):
            what = f"token {token!r} at position {position} is not an id from 0 to {LARGEST_TOKEN}"
            break
    else:
        what = "the tokens cannot be read as ids"
    return KVFerryError(
        what,
        kind=ErrorKind.UNSUPPORTED,
        where="chunk keys",
        why="placeholders and embeddings do not say which content the KV cache holds",
        remedy="do not cache this request, or hand in its tokens once they are known",
    )
