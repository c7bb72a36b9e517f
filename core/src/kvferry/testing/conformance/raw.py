"""The side door to a store: its bytes, without the backend that is put to the proof."""

from __future__ import annotations

from typing import Protocol


class RawStore(Protocol):
    """Stored records, by a name that only the author need understand.

    A record is whatever the backend keeps for one chunk: a file, a row, a value. If it keeps several
    for one chunk, each has a name of its own; one that stands for several chunks is left out. The kit
    damages records through this and looks whether the backend notices.

    It may use the store's own client, and must not use the backend.
    """

    live: bool
    """Whether it may be used while the backend is open. If not, the kit closes the backend first,
    which only makes sense for a store that outlives it."""

    def names(self) -> list[str]:
        """Names of all records."""
        ...

    def read(self, name: str) -> bytes:
        """The bytes of a record."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Replace the bytes of a record. They may be empty."""
        ...

    def delete(self, name: str) -> None:
        """Remove a record."""
        ...

    def used_bytes(self) -> int:
        """What all records take, counted as the capacity counts."""
        ...
