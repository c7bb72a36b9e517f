"""Arenas in memory files, with their first touch in the background."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from kvferry.api import ArenaOptions, ErrorKind, HugePages, KVFerryError, Region, Retry
from kvferry.data.mapping import MappedRegion, create_region
from kvferry.data.memory import (
    AvailableMemory,
    available_memory,
    memory_files_get_huge_pages,
    reserved_huge_pages,
)
from kvferry.data.native import find_native
from kvferry.data.touch import Populate, choose_populate, touch

_log = logging.getLogger(__name__)

STEP_BYTES = 16 << 20
"""Between two looks at the free memory, and two reports of progress."""

_GRAIN_BYTES = 2 << 20
"""Between two looks at the wish to close: some milliseconds even where memory comes slowly."""

SPARE_BYTES = 256 << 20
"""What first touch leaves to everyone else. It covers one step of each of a dozen workers that look
at the same free memory at the same moment."""


class PageKind(enum.Enum):
    """What an arena is made of."""

    SMALL = "small"
    TRANSPARENT = "transparent"
    """Huge pages where the kernel finds them, small ones elsewhere."""
    RESERVED = "reserved"
    """Huge pages an administrator set aside."""


class FirstTouch(enum.Enum):
    """How far the first touch of an arena has come."""

    NOT_STARTED = "not-started"
    RUNNING = "running"
    WAITING = "waiting"
    """The machine is short of memory. What is ready serves; the rest follows when memory is free."""
    DONE = "done"
    STOPPED = "stopped"
    """The arena was closed first."""
    FAILED = "failed"
    """The system refused a page. What was ready before stays ready, and no more follows."""


class MemoryFileArena:
    """A memory file of ``capacity`` bytes, touched from its start by one thread of its own.

    ``open`` refuses what the machine cannot hold; first touch then looks at the free memory again
    before every step, and waits rather than let the kernel choose a process to kill. ``available`` is
    asked for that; ``on_progress(ready, capacity)`` is called after each step from the touching
    thread and must not close the arena. ``root`` is where the description of the machine lies.

    Threads: ``open`` and ``close`` once each, from one thread; everything else from any.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        options: ArenaOptions | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        available: Callable[[], AvailableMemory] = available_memory,
        populate: Populate | None = None,
        root: Path = Path("/"),
        retry_seconds: float = 1.0,
    ) -> None:
        self._name = name
        self._capacity = capacity
        self._options = options or ArenaOptions()
        self._on_progress = on_progress
        self._available = available
        self._populate = populate
        self._root = root
        self._retry_seconds = retry_seconds
        self._mapped: MappedRegion | None = None
        self._pages = PageKind.SMALL
        self._ready = 0
        self._first_touch = FirstTouch.NOT_STARTED
        self._closing = threading.Event()
        self._settled = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> Region:
        """Map the file and start its first touch. Raises :class:`KVFerryError` of kind CAPACITY,
        CONFIG or UNSUPPORTED; nothing is left behind then."""
        if self._capacity < 1:
            raise KVFerryError(
                f"an arena of {self._capacity} bytes holds nothing",
                kind=ErrorKind.CONFIG,
                where=self._name,
                remedy="give the tier a capacity",
            )
        mapped = self._map()
        self._mapped = mapped
        populate = self._populate or choose_populate(find_native())
        self._first_touch = FirstTouch.RUNNING
        self._thread = threading.Thread(
            target=self._touch_all,
            args=(mapped.region, populate),
            name=f"kvferry-first-touch-{self._name}",
            daemon=True,  # a process that ends without closing must not wait for a minute of touching
        )
        self._thread.start()
        return mapped.region

    def ready_bytes(self) -> int:
        """How many bytes from the start may be used. Never falls while the arena is open."""
        return self._ready

    def first_touch(self) -> FirstTouch:
        return self._first_touch

    def pages(self) -> PageKind:
        """What the arena is made of; known once it is open."""
        return self._pages

    def wait(self, timeout: float) -> FirstTouch:
        """Wait at most ``timeout`` seconds until first touch is done, stopped or failed."""
        self._settled.wait(timeout)
        return self._first_touch

    def close(self) -> None:
        """Stop first touch and unmap. Idempotent. Waits for one piece of 2 MiB at most."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

    def _map(self) -> MappedRegion:
        wish = self._options.huge_pages
        if wish is not HugePages.NEVER:
            mapped = self._map_reserved()
            if mapped is not None:
                self._pages = PageKind.RESERVED
                return mapped
        transparent = wish is not HugePages.NEVER and memory_files_get_huge_pages(self._root)
        if wish is HugePages.REQUIRE and not transparent:
            raise self._no_huge_pages()
        self._check_capacity()
        mapped = create_region(self._name, self._capacity)
        mapped.leave_out_of_core_dumps()
        if transparent and mapped.advise_huge_pages():
            self._pages = PageKind.TRANSPARENT
        elif wish is HugePages.REQUIRE:
            mapped.close()
            raise self._no_huge_pages()
        return mapped

    def _map_reserved(self) -> MappedRegion | None:
        reserved = reserved_huge_pages(self._root)
        if reserved.free_bytes < self._capacity:
            return None
        try:
            return create_region(self._name, self._capacity, page_bytes=reserved.page_bytes, reserved=True)
        except KVFerryError as error:
            # Somebody else was faster, or a control group forbids them.
            _log.info("%s: reserved huge pages could not be had: %s", self._name, error.why)
            return None

    def _check_capacity(self) -> None:
        memory = self._available()
        if self._capacity + SPARE_BYTES > memory.size:
            raise KVFerryError(
                f"a capacity of {self._capacity} bytes does not fit into the {memory.size} bytes of "
                f"memory that are free",
                kind=ErrorKind.CAPACITY,
                where=self._name,
                why=f"{memory.source} says so, and {SPARE_BYTES} bytes stay free for everyone else",
                remedy=f"give the tier at most {max(0, memory.size - SPARE_BYTES)} bytes, or free "
                f"memory; the capacity is per worker",
                retry=Retry.LATER,
            )

    def _no_huge_pages(self) -> KVFerryError:
        reserved = reserved_huge_pages(self._root)
        return KVFerryError(
            f"no huge pages for {self._capacity} bytes",
            kind=ErrorKind.UNSUPPORTED,
            where=self._name,
            why=f"{reserved.free_bytes} bytes of reserved huge pages are free, and the kernel gives "
            f"none to memory files",
            remedy="echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root), or "
            "huge_pages: auto",
            retry=Retry.AFTER_CHANGE,
        )

    def _touch_all(self, region: Region, populate: Populate) -> None:
        try:
            self._first_touch = self._touch(region, populate)
        except OSError as error:
            self._first_touch = FirstTouch.FAILED
            _log.warning(
                "%s: the system gave only %d of %d bytes (%s); the tier works with these",
                *(self._name, self._ready, self._capacity, error.strerror),
            )
        finally:
            self._settled.set()

    def _touch(self, region: Region, populate: Populate) -> FirstTouch:
        while self._ready < self._capacity:
            end = min(self._ready + STEP_BYTES, self._capacity)
            if not self._wait_for_memory(end - self._ready):
                return FirstTouch.STOPPED
            while self._ready < end:
                if self._closing.is_set():
                    return FirstTouch.STOPPED
                length = min(_GRAIN_BYTES, end - self._ready)
                touch(populate, region, self._ready, length)
                self._ready += length
            self._report()
        return FirstTouch.DONE

    def _wait_for_memory(self, need: int) -> bool:
        """False when the arena closes meanwhile."""
        if self._pages is PageKind.RESERVED:  # mapping them took them out of everyone's reach
            return not self._closing.is_set()
        while (memory := self._available()).size < need + SPARE_BYTES:
            if self._first_touch is not FirstTouch.WAITING:
                self._first_touch = FirstTouch.WAITING
                _log.warning(
                    "%s: %d of %d bytes are ready; the rest waits, because only %d bytes are free "
                    "(%s) and %d stay free for everyone else",
                    *(self._name, self._ready, self._capacity),
                    *(memory.size, memory.source, SPARE_BYTES),
                )
            if self._closing.wait(self._retry_seconds):
                return False
        self._first_touch = FirstTouch.RUNNING
        return not self._closing.is_set()

    def _report(self) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(self._ready, self._capacity)
        except Exception:  # noqa: BLE001 - foreign code must not end the first touch
            _log.exception("%s: the progress report failed and is not called again", self._name)
            self._on_progress = None
