"""The lanes that bring values to the disk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from kvferry_backend_ssd.block_io import BlockIO
from kvferry_backend_ssd.faults import fault, told_as
from kvferry_backend_ssd.intake import Intake, Wave
from kvferry_backend_ssd.jobs import Queue
from kvferry_backend_ssd.recovery import load_once
from kvferry_backend_ssd.store import Store
from kvferry_backend_ssd.writing import NOT_WRITTEN, DataPhase

Commits = SimpleQueue[Wave | None]
"""What waits for its entries, and ``None`` for each lane that has ended."""


class WriteLane:
    """Writes whatever ``intake`` lets begin, until ``queue`` is closed, and hands it on to ``commits``."""

    def __init__(self, store: Store, queue: Queue, intake: Intake, commits: Commits, io: BlockIO) -> None:
        self._store = store
        self._queue = queue
        self._intake = intake
        self._commits = commits
        self._io = io
        self._beside = ThreadPoolExecutor(1, "kvferry-ssd-checksums")
        self._data = DataPhase(store, io, self._beside)

    def run(self) -> None:
        try:
            while self._queue.wait():
                if len(self._queue):
                    self._work()
        finally:
            self._commits.put(None)
            self._beside.shutdown()
            self._io.close()

    def _work(self) -> None:
        wave = Wave()
        try:
            load_once(self._store, self._io)
            wave = self._intake.gather(self._io)
            self._data.run(wave.writings, self._intake.settled())
        except Exception as error:  # noqa: BLE001 - the lane lives on, and nobody waits for ever
            self._abandon(wave, error)
            return
        self._release(wave)
        # Also an empty one: the table may have to forget something.
        self._commits.put(wave)

    def _release(self, wave: Wave) -> None:
        """Fail the writes of a wave that the disk refused, and leave the others in it."""
        refused = Wave([each for each in wave.writings if each.error is not None])
        if not refused:
            return
        wave.writings = [each for each in wave.writings if each.error is None]
        self._give_back(refused)
        for writing in refused.writings:
            assert writing.error is not None
            writing.item.fail(fault(writing.error, NOT_WRITTEN, self._store.file.path))
        self._intake.over(refused)

    def _give_back(self, wave: Wave) -> None:
        """The slots of writes that have no entry in the table."""
        with self._store.lock:
            for writing in wave.writings:
                self._store.space.give_back(writing.slot, writing.slots)

    def _abandon(self, wave: Wave, error: Exception) -> None:
        """The store cannot be asked, or we have a defect: fail all that begins here or waits."""
        told = told_as(error, "writing")
        self._give_back(wave)
        wave.fail(told)
        self._intake.over(wave)
        for _ in range(len(self._queue)):
            item = self._queue.take()
            if item is None:
                break
            item.fail(told)
