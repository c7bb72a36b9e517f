"""Digests of chunks hashed lately, so that a later turn of a conversation hashes new tokens only."""

from __future__ import annotations

from collections import OrderedDict

# Tuple, digest, two object headers and the table's share per entry; a test holds it against what
# the interpreter really allocates.
_ENTRY_BYTES = 400


class ChainCache:
    """Remembers which digest followed from a parent's digest and a chunk's content.

    Exact: a digest is given only when the parent and every byte of the content are equal, so it is
    the one that hashing would have given. Salt, LoRA and namespace need no place here, because they
    decide the parent. Bounded by ``capacity_bytes`` of memory, least recently used first; 0 keeps
    nothing. Not safe for several threads: one per scheduler.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._digests: OrderedDict[tuple[bytes, bytes], bytes] = OrderedDict()

    def find(self, parent: bytes, content: bytes) -> bytes | None:
        """The digest, or ``None`` when it has to be computed."""
        link = (parent, content)
        digest = self._digests.get(link)
        if digest is not None:
            self._digests.move_to_end(link)
        return digest

    def add(self, parent: bytes, content: bytes, digest: bytes) -> None:
        """Remember a digest just computed; forget the oldest ones beyond the capacity."""
        link = (parent, content)
        if link not in self._digests:
            self.used_bytes += _cost(link)
        self._digests[link] = digest
        while self.used_bytes > self.capacity_bytes:
            oldest, _ = self._digests.popitem(last=False)
            self.used_bytes -= _cost(oldest)

    def clear(self) -> None:
        """Forget everything."""
        self._digests.clear()
        self.used_bytes = 0


def _cost(link: tuple[bytes, bytes]) -> int:
    return len(link[1]) + _ENTRY_BYTES
