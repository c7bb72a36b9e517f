"""Workers that really hold bytes: slots of a tier, blocks of an engine, and a queue of copies."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable

from attrs import define, field

from kvferry.data.plans import Direction, Transfer
from tests.simulation.events import EventLoop, require
from tests.simulation.truth import CHUNK_BLOCKS, GARBAGE

PIECE_SECONDS = 0.002
STALL_SECONDS = (0.05, 1.5)


@define
class Row:
    """A block of a slot, and where it comes from or goes to.

    ``right`` are the bytes that have to arrive. ``block`` is a block of the engine, or -1 for bytes that
    came with the plan.
    """

    slot: int
    position: int
    block: int
    right: int


@define(eq=False)
class Job:
    """One transfer on one rank. ``failed`` are slots that were not copied in full."""

    id: tuple[str, int]
    request_id: str
    direction: Direction
    rows: list[Row]
    at: int = 0
    failed: set[int] = field(factory=set)
    beside: bool = False
    """Whether the engine waits to hear of a load that runs beside its forward passes."""
    checked: bool = True
    """Whether a load must bring the right bytes; not when its plan names slots that are none."""

    @property
    def slots(self) -> set[int]:
        return {row.slot for row in self.rows}


def rows_of(transfer: Transfer, right: Callable[[int], int]) -> list[Row]:
    """The rows of a real plan; ``right(block)`` is what a block of the engine must hold."""
    (rows,) = transfer.groups
    columns = (rows.slot_column, rows.position_column, rows.block_column)
    return [
        Row(slot, position, block, right(block))
        for slot, position, block in zip(*(column.tolist() for column in columns), strict=True)
    ]


@define
class Trouble:
    """How often copies go wrong."""

    failed_piece: float = 0.03
    refused_plan: float = 0.02
    stalled: float = 0.03
    dropped_flush: float = 0.3


class Rank:
    """One life of one worker: it copies piece by piece, a piece being the rows of one slot.

    ``slots`` outlives it where the memory does. ``on_end(rank, job)`` hears of every job that ended; a
    dead rank tells nothing any more.
    """

    def __init__(
        self,
        loop: EventLoop,
        number: int,
        epoch: int,
        slots: list[list[int]],
        blocks: int,
        trouble: Trouble,
        on_end: Callable[[Rank, Job], None],
    ) -> None:
        self.number = number
        self.epoch = epoch
        self.slots = slots
        self.cells = [GARBAGE] * blocks
        self.alive = True
        self.silent_until = 0.0
        self.writing: Counter[int] = Counter()
        """Transfers, told or on their way, that may write a slot."""
        self.reading: Counter[int] = Counter()
        self._loop = loop
        self._trouble = trouble
        self._on_end = on_end
        self._loads: deque[Job] = deque()
        self._saves: deque[Job] = deque()
        self._known: dict[tuple[str, int], Job] = {}
        self._working = False

    # -- plans ------------------------------------------------------------------------------------

    def expect(self, job: Job) -> None:
        """From now on this rank may be at the job's slots."""
        if not self.alive:
            return
        users = self.writing if job.direction is Direction.SAVE else self.reading
        users.update(job.slots)

    def will_write(self, slots: Collection[int]) -> None:
        """Somebody else of this rank may write these slots until :meth:`wrote` says otherwise."""
        if self.alive:
            self.writing.update(slots)

    def wrote(self, slots: Collection[int]) -> None:
        _count_down(self.writing, slots)

    def submit(self, job: Job) -> None:
        """Queue a job that was expected before."""
        if self._loop.chance(self._trouble.refused_plan):
            self._loop.fault("refused plan")
            job.failed |= job.slots
            job.at = len(job.rows)
        (self._loads if job.direction is Direction.LOAD else self._saves).append(job)
        self._wake()

    def submit_once(self, job: Job) -> bool:
        """As :meth:`submit`, for plans that may come several times. A repeated one whose job has ended
        is answered again, and changes nothing."""
        known = self._known.get(job.id)
        if known is None:
            self._known[job.id] = job
            self.submit(job)
            return True
        if known not in self._saves:
            self._on_end(self, known)
        return False

    def forget(self, id: tuple[str, int]) -> None:
        """Its plan will not come again."""
        self._known.pop(id, None)

    def run_now(self, job: Job) -> None:
        """A load in front of the forward pass."""
        if self._loop.chance(self._trouble.refused_plan):
            self._loop.fault("refused plan")
            job.failed |= job.slots
            job.at = len(job.rows)
        while job.at < len(job.rows):
            self._piece(job)
        self._end(job)

    def pending_saves(self, request_id: str) -> bool:
        return any(job.request_id == request_id for job in self._saves)

    def flush(self, requests: Collection[str]) -> None:
        """Saves of these requests end now, because their blocks will be overwritten."""
        for job in [job for job in self._saves if job.request_id in requests]:
            if self._loop.chance(self._trouble.dropped_flush):
                self._loop.fault("dropped save")
                job.failed |= {row.slot for row in job.rows[job.at :]}
                job.at = len(job.rows)
            while job.at < len(job.rows):
                self._piece(job)
            self._saves.remove(job)
            self._end(job)

    def drop_everything(self) -> None:
        """An orderly end: nothing is copied any more, and all jobs are told as failed."""
        for queue in (self._loads, self._saves):
            for job in list(queue):
                job.failed |= {row.slot for row in job.rows[job.at :]}
                job.at = len(job.rows)
                self._end(job)
            queue.clear()

    def die(self) -> None:
        """In the middle of a piece, which may leave it half done."""
        for queue in (self._loads, self._saves):
            for job in queue:
                if job.at < len(job.rows) and job.direction is Direction.SAVE:
                    self._tear(job)
                break
        self.stop()

    def stop(self) -> None:
        """Nothing is copied from now on, whatever was told or is on its way."""
        self.alive = False
        self.writing.clear()
        self.reading.clear()

    # -- copies -----------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._working and (self._loads or self._saves):
            self._working = True
            pause = self._loop.random.expovariate(1 / PIECE_SECONDS)
            fault = ""
            if self._loop.chance(self._trouble.stalled):
                pause, fault = self._loop.random.uniform(*STALL_SECONDS), "stalled copy"
            self._loop.after(pause, "copy", self._work, fault=fault)

    def _work(self) -> None:
        self._working = False
        if not self.alive:
            return
        queue = self._loads or self._saves
        if queue:
            job = queue[0]
            if job.at < len(job.rows):
                self._piece(job)
            if job.at >= len(job.rows):
                queue.remove(job)
                self._end(job)
        self._wake()

    def _piece(self, job: Job) -> None:
        """All rows of one slot: copied, or failed with an error and perhaps half of them copied."""
        slot = job.rows[job.at].slot
        if not 0 <= slot < len(self.slots):
            job.failed |= job.slots
            job.at = len(job.rows)
            return
        if self._loop.chance(self._trouble.failed_piece):
            self._loop.fault("failed copy")
            self._tear(job)
            job.failed.add(slot)
            while job.at < len(job.rows) and job.rows[job.at].slot == slot:
                job.at += 1
            return
        while job.at < len(job.rows) and job.rows[job.at].slot == slot:
            self._copy(job, job.rows[job.at])
            job.at += 1

    def _copy(self, job: Job, row: Row) -> None:
        held = self.slots[row.slot]
        if job.direction is Direction.SAVE:
            held[row.position] = self.cells[row.block] if row.block >= 0 else row.right
            return
        value = held[row.position]
        self.cells[row.block] = value
        require(
            value == row.right or not job.checked,
            "right bytes under a lease",
            f"rank {self.number} loaded wrong bytes from slot {row.slot} for {job.request_id}",
        )

    def _tear(self, job: Job) -> None:
        slot = job.rows[job.at].slot
        if not 0 <= slot < len(self.slots):
            return
        rows = [row for row in job.rows[job.at :] if row.slot == slot]
        for row in rows[: self._loop.random.randrange(len(rows) + 1)]:
            if job.direction is Direction.SAVE:
                self.slots[slot][row.position] = GARBAGE
            else:
                self.cells[row.block] = GARBAGE

    def _end(self, job: Job) -> None:
        users = self.writing if job.direction is Direction.SAVE else self.reading
        _count_down(users, job.slots)
        self._on_end(self, job)


def _count_down(users: Counter[int], slots: Iterable[int]) -> None:
    for slot in slots:
        users[slot] -= 1
        if users[slot] <= 0:
            del users[slot]


def empty_slots(count: int) -> list[list[int]]:
    return [[GARBAGE] * CHUNK_BLOCKS for _ in range(count)]


def busy(ranks: Iterable[Rank], slot: int) -> bool:
    """Whether any rank may still write a slot."""
    return any(slot in rank.writing for rank in ranks)
