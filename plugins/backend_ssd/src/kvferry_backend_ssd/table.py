"""The table in the file: entries are put into their pages, in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from kvferry_backend_ssd.block_io import BlockIO, Piece, Purpose
from kvferry_backend_ssd.bounce import Bounce
from kvferry_backend_ssd.faults import os_error, short_write
from kvferry_backend_ssd.layout import ENTRIES_PER_PAGE, ENTRY_BYTES, PAGE
from kvferry_backend_ssd.store import Store, page_of

_BOUNCE_PAGES = 512
_KEPT_PAGES = 2048
_ZEROS = bytes(PAGE)

Write = Callable[[Sequence[Piece]], list[int]]
"""Writes pieces; results as of :class:`BlockIO`."""


class Table:
    """Writes entries. A page is rewritten with the same bytes but for the entries that change, so that a
    torn write can harm no other. Threads: any; they take turns."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._bounce = Bounce(_BOUNCE_PAGES * PAGE)
        self._pages: dict[int, bytes] = {}
        """Contents of the pages that were written last: chunks that come together lie together."""
        self._end = store.file.length
        """The file's end when this began. What was added behind it is zero until it is written."""
        self._behind: set[int] = set()
        """Pages behind that end that were written, or tried to be."""

    def put(
        self, entries: Mapping[int, bytes], io: BlockIO, write: Write | None = None
    ) -> dict[int, OSError]:
        """Write entries by slot, and the store's repairs, which are kept where they fail. The slots of those
        ``entries`` that may not be in the file as they should, with the reason.

        Nothing is durable before a flush. ``write`` stands for that of ``io``.
        """
        with self._lock:
            with self._store.lock:
                repairs, self._store.repairs = self._store.repairs, {}
            failed = self._put_all(
                {**repairs, **entries}, io, write or partial(io.write, self._store.file.fd)
            )
            again = {slot: repairs[slot] for slot in repairs.keys() & failed.keys() - entries.keys()}
            with self._store.lock:
                self._store.repairs = again | self._store.repairs
            return {slot: failed[slot] for slot in failed.keys() & entries.keys()}

    def _put_all(self, entries: Mapping[int, bytes], io: BlockIO, write: Write) -> dict[int, OSError]:
        by_page: dict[int, dict[int, bytes]] = {}
        for slot, entry in entries.items():
            by_page.setdefault(page_of(slot), {})[slot] = entry
        failed: dict[int, OSError] = {}
        pages = sorted(by_page)
        for at in range(0, len(pages), _BOUNCE_PAGES):
            part = {page: by_page[page] for page in pages[at : at + _BOUNCE_PAGES]}
            for page, error in self._put(part, io, write).items():
                failed |= dict.fromkeys(part[page], error)
        while len(self._pages) > _KEPT_PAGES:
            del self._pages[next(iter(self._pages))]
        return failed

    def _put(self, pages: Mapping[int, Mapping[int, bytes]], io: BlockIO, write: Write) -> dict[int, OSError]:
        failed = self._fetch([page for page in pages if page not in self._pages], io)
        changed = [page for page in pages if page not in failed]
        self._bounce.reset()
        pieces = []
        for page in changed:
            view, address = self._bounce.take(PAGE)
            view[:] = self._pages.pop(page)
            for slot, entry in pages[page].items():
                inside = slot % ENTRIES_PER_PAGE * ENTRY_BYTES
                view[inside : inside + ENTRY_BYTES] = entry
            self._pages[page] = bytes(view)
            pieces.append(Piece(self._store.file.layout.page_at(page), address, PAGE, Purpose.TABLE))
        results = write(pieces)
        for page, result in zip(changed, results, strict=True):
            if result != PAGE:
                del self._pages[page]
                failed[page] = short_write(result)
        return failed

    def _fetch(self, pages: Iterable[int], io: BlockIO) -> dict[int, OSError]:
        """Read pages as they are in the file; those that cannot be read, with the reason."""
        self._bounce.reset()
        missing, views, pieces = [], [], []
        for page in pages:
            if self._store.file.layout.page_at(page) >= self._end and page not in self._behind:
                self._pages[page] = _ZEROS
                self._behind.add(page)
            else:
                missing.append(page)
        for page in missing:
            view, address = self._bounce.take(PAGE)
            views.append(view)
            pieces.append(Piece(self._store.file.layout.page_at(page), address, PAGE, Purpose.TABLE))
        failed: dict[int, OSError] = {}
        if not missing:
            return failed
        results = io.read(self._store.file.fd, pieces)
        for page, view, result in zip(missing, views, results, strict=True):
            if result < 0:
                failed[page] = os_error(result)
            else:
                self._pages[page] = bytes(view[:result]).ljust(PAGE, b"\x00")
        return failed
