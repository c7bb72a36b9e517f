"""The memory that this channel has registered, and who is in it at the moment."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from attrs import define

from kvferry.api import ErrorKind, KVFerryError, MemoryKind, Region, Retry
from kvferry_transport_local.frames import MAXIMUM_NAME_BYTES
from kvferry_transport_local.generations import SLOTS, Generations
from kvferry_transport_local.system import place_in_file


@define(eq=False)
class Registered:
    """A region under its slot and generation. ``in_file`` is where its memory file holds it, or -1."""

    region: Region
    slot: int
    generation: int
    in_file: int
    gone: bool = False
    users: int = 0
    """Pieces that are under way in this memory."""


class Regions:
    """Registered regions by name. Threads: any; ``close`` last."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._page = Generations()
        self._page.raise_word(0)
        self._names: dict[str, Registered] = {}
        self._slots: dict[int, Registered] = {}
        self._free = list(range(SLOTS - 1, 0, -1))
        self._changed = threading.Condition()

    @property
    def page_fd(self) -> int:
        """The descriptor of the page of generations, for peers."""
        return self._page.fd

    def register(self, region: Region) -> Registered:
        """Raises :class:`KVFerryError` as :meth:`kvferry.api.Channel.register` says."""
        if region.kind is not MemoryKind.HOST:
            raise KVFerryError(
                f"the region {region.name!r} is memory of a device",
                kind=ErrorKind.UNSUPPORTED,
                where=self._where,
                why="processes reach each other's host memory alone",
                remedy="stage it in host memory, or use the channel of the device's maker",
            )
        name = region.name.encode("utf-8", "surrogatepass")
        if len(name) > MAXIMUM_NAME_BYTES or name != region.name.encode("utf-8", "replace"):
            raise KVFerryError(
                "the name of a region cannot be told to peers",
                kind=ErrorKind.UNSUPPORTED,
                where=self._where,
                why=f"it begins with {region.name[:40]!r}, and may have {MAXIMUM_NAME_BYTES} bytes of UTF-8",
                remedy="choose another name",
            )
        in_file = place_in_file(region.address, region.length, region.fd) if region.fd >= 0 else None
        with self._changed:
            if region.name in self._names:
                raise KVFerryError(
                    f"the region {region.name!r} is registered already",
                    kind=ErrorKind.INTERNAL,
                    where=self._where,
                    remedy="deregister it first, or give each region a name of its own",
                )
            if not self._free:
                raise KVFerryError(
                    f"{SLOTS - 1} regions are registered, and there is room for no more",
                    kind=ErrorKind.CAPACITY,
                    where=self._where,
                    remedy="register fewer and larger regions",
                    retry=Retry.AFTER_CHANGE,
                )
            slot = self._free.pop()
            made = Registered(region, slot, self._page.raise_word(slot), -1 if in_file is None else in_file)
            self._names[region.name] = self._slots[slot] = made
            return made

    def find(self, name: str) -> Registered | None:
        return self._names.get(name)

    def at(self, slot: int, generation: int) -> Registered | None:
        """The region that a peer names by numbers; ``None`` once it was taken back."""
        found = self._slots.get(slot)
        return found if found is not None and found.generation == generation else None

    def all(self) -> tuple[Registered, ...]:
        with self._changed:
            return tuple(self._names.values())

    def take_back(self, name: str) -> Registered | None:
        """From here on nobody enters it, and peers that are copying from it will notice."""
        with self._changed:
            found = self._names.pop(name, None)
            if found is not None:
                self._slots.pop(found.slot)
                self._page.raise_word(found.slot)
                found.gone = True
                self._free.insert(0, found.slot)
            return found

    def enter(self, wanted: Iterable[Registered]) -> set[Registered]:
        """Those that may be written into until :meth:`leave`; the others were taken back."""
        with self._changed:
            entered = {each for each in wanted if not each.gone}
            for each in entered:
                each.users += 1
            return entered

    def leave(self, entered: Iterable[Registered]) -> None:
        with self._changed:
            for each in entered:
                each.users -= 1
            self._changed.notify_all()

    def wait_until_empty(self, taken: Registered, seconds: float | None = None) -> bool:
        """Until no piece is under way in a region that was taken back; whether it is so."""
        with self._changed:
            return self._changed.wait_for(lambda: taken.users == 0, seconds)

    def say_closed(self) -> None:
        """Peers see that the channel is gone."""
        with self._changed:
            self._page.raise_word(0)

    def close(self) -> None:
        """The page goes. Idempotent."""
        self._page.close()
