"""The lanes that bring values to the disk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

from kvferry.api import KVFerryError
from kvferry_backend_ssd.block_io import BlockIO
from kvferry_backend_ssd.committing import Committing
from kvferry_backend_ssd.faults import told_as
from kvferry_backend_ssd.intake import Intake, Wave
from kvferry_backend_ssd.jobs import Queue
from kvferry_backend_ssd.recovery import load_once
from kvferry_backend_ssd.store import Store
from kvferry_backend_ssd.table import Table
from kvferry_backend_ssd.writing import Entries, Values

USES_SECONDS = 30.0
"""How long the order of uses may stay in memory alone while there is no work."""


class WriteLane:
    """Writes whatever ``intake`` lets begin, until ``queue`` is closed, and commits it.

    Values go through ``io`` while checksums are computed and entries written, through ``beside``. The order
    is of no matter: one flush stands behind all of it, and a restart does not trust an entry without one.
    """

    def __init__(
        self,
        store: Store,
        queue: Queue,
        intake: Intake,
        commits: Committing,
        table: Table,
        io: BlockIO,
        beside: BlockIO,
    ) -> None:
        self._store = store
        self._queue = queue
        self._intake = intake
        self._commits = commits
        self._ios = (io, beside)
        self._beside = ThreadPoolExecutor(1, "kvferry-ssd-entries")
        self._values = Values(store, io)
        self._entries = Entries(store, table, beside)

    def run(self) -> None:
        try:
            while self._queue.wait(USES_SECONDS):
                if len(self._queue):
                    self._work()
                else:
                    self._commits.write_uses(self._ios[0])
            self._commits.finish(self._ios[0])
        finally:
            self._beside.shutdown()
            for io in self._ios:
                io.close()

    def _work(self) -> None:
        wave = Wave()
        try:
            load_once(self._store, self._ios[0])
            wave = self._intake.gather(self._ios[0])
            if wave.writings:
                self._write(wave)
        except Exception as error:  # noqa: BLE001 - the lane lives on, and nobody waits for ever
            told = told_as(error, "writing")
            for writing in wave.writings:
                writing.refuse(told)
            self._fail_waiting(told)
        self._commits.put(wave, self._ios[0])

    def _write(self, wave: Wave) -> None:
        entries = self._beside.submit(self._entries.write, wave.writings, self._intake.settled())
        try:
            self._values.write(wave.writings)
        finally:
            wait([entries])  # nobody looks at the memory of a write that has ended
        entries.result()

    def _fail_waiting(self, told: KVFerryError) -> None:
        """The store cannot be asked, or we have a defect."""
        for _ in range(len(self._queue)):
            item = self._queue.take()
            if item is None:
                break
            item.fail(told)
