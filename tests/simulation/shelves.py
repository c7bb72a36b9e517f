"""What ranks hold of a tier below the first, and workers that carry out orders on it: slowly, in any order
that is allowed, and with every fault that a store can have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import define, field

from kvferry.control.orders import ItemFault
from kvferry.data.wire import (
    Cancel,
    Chunk,
    CloseTier,
    DeleteChunks,
    FetchChunks,
    FromWorker,
    OpenTier,
    OrderDone,
    StoreChunks,
    TierClosed,
    TierContent,
    TierOrder,
)
from tests.simulation.coverage import Coverage
from tests.simulation.events import EventLoop, require
from tests.simulation.ranks import Rank
from tests.simulation.truth import BLOCK, GARBAGE

PIECE_SECONDS = 0.003
STALL_SECONDS = (0.5, 12.0)
Cells = tuple[int, ...]
Work = StoreChunks | FetchChunks | DeleteChunks
Expected = Mapping[int, Cells]
"""What slots must hold that are to be copied down."""


@define(kw_only=True)
class StoreTrouble:
    """How often orders and chunks of them go wrong."""

    stalled: float = 0.04
    failed_order: float = 0.03
    failed_chunk: float = 0.03
    cannot_open: float = 0.08
    cut_at_close: float = 0.5


@define(eq=False)
class Shelf:
    """One rank's store of one tier, which outlives its workers. By digest, or by full key what belongs to
    others; the least recently used first."""

    room: int
    chunks: dict[bytes, tuple[Chunk | None, Cells]] = field(factory=dict)
    unsynced: dict[bytes, None] = field(factory=dict)
    """Written for orders that have not ended: a crash may take them."""
    damaged: set[bytes] = field(factory=set)
    """Chunks that were lost or spoilt by nobody's order."""
    ill_until: float = 0.0
    namespace: bytes = b""
    """Whose chunks stand by digest."""
    hidden: dict[bytes, Chunk] = field(factory=dict)
    """What is known of chunks of others, by full key, should they become ours again."""

    def belong_to(self, namespace: bytes) -> None:
        """Whoever opens it from now on has this namespace."""
        former, self.namespace = self.namespace, namespace
        if former in (b"", namespace):
            return
        before, self.chunks = self.chunks, {}
        damaged, self.damaged = self.damaged, set()
        for key, (chunk, cells) in before.items():
            name, known = key, None
            if chunk is not None:
                name = former + key
                self.hidden[name] = chunk
            elif key.startswith(namespace) and key in self.hidden:
                name, known = key[len(namespace) :], self.hidden.pop(key)
            self.chunks[name] = (known, cells)
            if key in damaged:
                self.damaged.add(name)

    def put(self, chunk: Chunk, cells: Cells) -> ItemFault | None:
        if chunk.digest in self.chunks:
            return None
        if len(self.chunks) >= self.room:
            return ItemFault.NO_SPACE
        self.chunks[chunk.digest] = (chunk, cells)
        self.damaged.discard(chunk.digest)
        return None

    def remove(self, key: bytes) -> None:
        self.chunks.pop(key, None)
        self.hidden.pop(key, None)
        self.damaged.discard(key)

    def crash(self, keeps: Callable[[], bool]) -> int:
        """Writes that were not acknowledged may be there or not; how many are not."""
        lost = [key for key in self.unsynced if not keeps()]
        for key in lost:
            self.remove(key)
        self.unsynced.clear()
        return len(lost)


@define(eq=False)
class _Task:
    order: Work
    expected: Expected
    at: int = 0
    faults: dict[int, ItemFault] = field(factory=dict)
    cancelled: bool = False
    over: bool = False

    @property
    def items(self) -> int:
        return len(self.order.chunks if isinstance(self.order, StoreChunks) else self.order.digests)


class ShelfWorker:
    """One life of a rank over one shelf. ``tell`` sends a message, which never overtakes another."""

    def __init__(
        self,
        loop: EventLoop,
        coverage: Coverage,
        rank: Rank,
        tier: str,
        shelf: Shelf,
        trouble: StoreTrouble,
        calm: Callable[[], bool],
        tell: Callable[[FromWorker], None],
    ) -> None:
        self._loop = loop
        self._coverage = coverage
        self._rank = rank
        self._tier = tier
        self._shelf = shelf
        self._trouble = trouble
        self._calm = calm
        self._tell = tell
        self._opening = 0
        """Number of the opening; 0 while it is closed."""
        self._closing = False
        self._tasks: dict[int, _Task] = {}
        self._writes: list[_Task] = []
        self._deleting = 0

    def take(self, order: TierOrder, expected: Expected) -> None:
        if not self._rank.alive:
            return
        match order:
            case OpenTier():
                self._soon(lambda: self._open(order), "tier opens", slow=3)
            case CloseTier():
                self._close(order.opening)
            case Cancel():
                self._cancel(order.id)
            case _:
                self._begin(_Task(order, expected))

    def end(self) -> None:
        """An orderly end of the worker: what is under way is cut off, and told."""
        for task in list(self._tasks.values()):
            self._cut(task)
        self._opening = 0

    # Openings

    def _open(self, order: OpenTier) -> None:
        number = order.opening
        if self._chance(self._trouble.cannot_open) or self._ill:
            self._loop.fault("tier cannot be opened")
            self._tell(TierClosed(self._rank.number, self._rank.epoch, self._tier, number, "simulated"))
            return
        self._opening, self._closing = number, False
        self._shelf.belong_to(order.namespace)
        own = tuple(chunk for chunk, _ in self._shelf.chunks.values() if chunk is not None)
        foreign = tuple(key for key, (chunk, _) in self._shelf.chunks.items() if chunk is None)
        half = len(own) // 2
        rank = self._rank
        for chunks, keys, last in ((own[:half], (), False), (own[half:], foreign, True)):
            self._tell(TierContent(rank.number, rank.epoch, self._tier, number, chunks, keys, last))

    def _close(self, number: int) -> None:
        if self._opening != number:
            self._tell(TierClosed(self._rank.number, self._rank.epoch, self._tier, number, ""))
            return
        self._closing = True
        for task in list(self._tasks.values()):
            if task in self._writes or self._chance(self._trouble.cut_at_close):
                self._cut(task)
        self._closed_if_done()

    def _closed_if_done(self) -> None:
        if self._closing and not self._tasks:
            number, self._opening, self._closing = self._opening, 0, False
            self._tell(TierClosed(self._rank.number, self._rank.epoch, self._tier, number, ""))

    # Orders

    def _begin(self, task: _Task) -> None:
        order = task.order
        if order.opening != self._opening or self._closing:
            self._fail(task, ItemFault.CANCELLED)
            self._done(task)
            return
        self._tasks[order.id] = task
        slow = 1.0
        if self._ill or self._chance(self._trouble.failed_order):
            self._loop.fault("failed order")
            if self._chance(0.5):
                # What was done until then stays done.
                self._fail(task, ItemFault.FAILED)
            else:
                slow = self._loop.random.uniform(*STALL_SECONDS) / PIECE_SECONDS
                self._soon(lambda: self._time_out(task), "tier times out", slow=order.seconds / PIECE_SECONDS)
        elif self._chance(self._trouble.stalled):
            self._loop.fault("stalled order")
            slow = self._loop.random.uniform(*STALL_SECONDS) / PIECE_SECONDS
        if isinstance(order, StoreChunks):
            self._writes.append(task)
            if order.evicted:
                self._deleting += 1
                self._soon(lambda: self._delete(task, order.evicted), "tier deletes", slow=slow)
            else:
                self._write_waiting(slow)
        elif isinstance(order, DeleteChunks):
            self._deleting += 1
            self._soon(lambda: self._delete(task, order.digests), "tier deletes", slow=slow)
        else:
            self._soon(lambda: self._work(task), "tier reads", slow=slow)

    def _delete(self, task: _Task, keys: Sequence[bytes]) -> None:
        self._deleting -= 1
        if task.over:
            self._write_waiting()
            return
        for place, key in enumerate(keys):
            if place not in task.faults and not self._chance(self._trouble.failed_chunk / 2):
                self._shelf.remove(key)
            elif isinstance(task.order, DeleteChunks):
                task.faults.setdefault(place, ItemFault.FAILED)
            else:
                self._fail(task, ItemFault.FAILED)
        if isinstance(task.order, DeleteChunks) or task.faults:
            self._done(task)
        self._write_waiting()

    def _write_waiting(self, slow: float = 1.0) -> None:
        while self._writes and not self._deleting:
            task = self._writes.pop(0)
            self._soon(lambda task=task: self._work(task), "tier writes", slow=slow)

    def _work(self, task: _Task) -> None:
        """One chunk of an order."""
        if task.over:
            return
        if task.at < task.items:
            place, task.at = task.at, task.at + 1
            if self._chance(self._trouble.failed_chunk):
                self._loop.fault("failed chunk")
                fault = self._loop.random.choice((ItemFault.FAILED, ItemFault.TIMEOUT, ItemFault.CANCELLED))
                task.faults.setdefault(place, fault)
            if isinstance(task.order, StoreChunks):
                self._write(task, task.order, place)
            elif isinstance(task.order, FetchChunks):
                self._read(task, task.order, place)
            self._soon(lambda: self._work(task), "tier goes on")
            return
        self._done(task)

    def _write(self, task: _Task, order: StoreChunks, place: int) -> None:
        chunk, slot = order.chunks[place], order.slots[place]
        cells = tuple(self._rank.slots[slot][: chunk.tokens // BLOCK])
        require(
            cells == task.expected[slot], "what is lent stays as it is", f"slot {slot} of order {order.id}"
        )
        if place in task.faults and not self._loop.chance(0.3):
            return
        known = chunk.digest in self._shelf.chunks
        fault = self._shelf.put(chunk, cells)
        if fault is not None:
            task.faults.setdefault(place, fault)
        elif not known:
            self._shelf.unsynced[chunk.digest] = None

    def _read(self, task: _Task, order: FetchChunks, place: int) -> None:
        digest, slot = order.digests[place], order.slots[place]
        cells = self._rank.slots[slot]
        held = self._shelf.chunks.get(digest)
        blocks = order.tokens[place] // BLOCK
        if place in task.faults:
            cells[:blocks] = [GARBAGE] * blocks
        elif held is None:
            task.faults[place] = ItemFault.GONE
        elif GARBAGE in held[1]:
            task.faults[place] = ItemFault.CORRUPT
            cells[:blocks] = held[1]
        else:
            cells[:blocks] = held[1]
            self._shelf.chunks[digest] = self._shelf.chunks.pop(digest)

    def _time_out(self, task: _Task) -> None:
        if not task.over:
            self._fail(task, ItemFault.TIMEOUT)
            self._done(task)

    def _cancel(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None and self._loop.chance(0.7):
            self._coverage.tier("fetch: called off")
            self._cut(task)

    def _cut(self, task: _Task) -> None:
        for place in range(task.at, task.items):
            task.faults.setdefault(place, ItemFault.CANCELLED)
        self._done(task)

    def _fail(self, task: _Task, fault: ItemFault) -> None:
        for place in range(task.items):
            task.faults.setdefault(place, fault)

    def _done(self, task: _Task) -> None:
        """Nothing is touched for it any more."""
        task.over = True
        order = task.order
        if task in self._writes:
            self._writes.remove(task)
        if isinstance(order, StoreChunks):
            for place, chunk in enumerate(order.chunks):
                if place not in task.faults:
                    self._shelf.unsynced.pop(chunk.digest, None)
        if isinstance(order, FetchChunks):
            self._rank.wrote(order.slots)
        self._tasks.pop(order.id, None)
        self._count(task)
        named = {place: fault.value for place, fault in task.faults.items()}
        reason = "simulated" if named else ""
        self._tell(OrderDone(self._rank.number, self._rank.epoch, order.id, named, reason))
        self._closed_if_done()

    def _count(self, task: _Task) -> None:
        kind = type(task.order).__name__.removesuffix("Chunks").lower()
        faults = set(task.faults.values())
        how = "failed" if len(task.faults) == task.items else "ended in part" if faults else "ended"
        self._coverage.tier(f"{kind}: {how}")
        for fault in faults:
            self._coverage.tier(f"{kind}: {fault.value}")

    # Helpers

    @property
    def _ill(self) -> bool:
        return self._loop.now < self._shelf.ill_until and not self._calm()

    def _chance(self, probability: float) -> bool:
        return not self._calm() and self._loop.chance(probability)

    def _soon(self, action: Callable[[], object], kind: str, *, slow: float = 1.0) -> None:
        rank = self._rank

        def happen() -> None:
            if rank.alive:
                action()

        self._loop.after(self._loop.random.expovariate(1 / (slow * PIECE_SECONDS)), kind, happen)


def keys_of(shelves: Iterable[Shelf]) -> set[bytes]:
    """What any of them holds."""
    return {key for shelf in shelves for key in shelf.chunks}
