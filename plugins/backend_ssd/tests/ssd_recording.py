"""I/O that tells a log what it does to the file, and the workloads that are recorded through it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from attrs import evolve, frozen

from kvferry.api import DeleteStatus, ReadStatus, Ticket, WriteStatus
from kvferry.testing.block_replay import BlockLog, PowerCut, Resize, Write
from kvferry.testing.conformance.driver import Driver, told
from kvferry_backend_ssd.block_io import BlockIO, ForwardingIO, Piece
from plugins.backend_ssd.tests.ssd_crash import Promises, Rig, Wrap, check, chunk, chunks, content, key

Step = tuple[str, Sequence[int]]
"""``store``, ``delete`` or ``read``, and the numbers of chunks, one batch; ``begin store`` and so on do not
wait for its end; ``wait`` waits for all."""

Tell = Callable[[int, WriteStatus | DeleteStatus | None], object]
"""Told a chunk's number, and the result, or ``None`` when it is asked for."""

_GOOD = (WriteStatus.STORED, DeleteStatus.DELETED, ReadStatus.FOUND)


class RecordingIO(ForwardingIO):
    """Tells ``log`` of every change before it is made, and of every flush."""

    def __init__(self, inner: BlockIO, log: BlockLog) -> None:
        super().__init__(inner)
        self._log = log

    def write(self, fd: int, pieces: Sequence[Piece]) -> list[int]:
        changes = [Write(piece.offset, content(piece.address, piece.length)) for piece in pieces]
        with self._log.changing(*changes):
            return super().write(fd, pieces)

    def flush(self, fd: int) -> None:
        with self._log.flushing():
            super().flush(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        # It is only ever asked for what lies behind the end.
        with self._log.changing(Resize(offset + length)):
            super().allocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        with self._log.changing(Resize(length)):
            super().truncate(fd, length)


class Recording:
    """Runs steps over a store, one session after the other, and remembers when each promise was given.

    ``between`` is put between the backend and the recorder: a mistake. ``image`` is what the file holds
    at the beginning.
    """

    def __init__(self, rig: Rig, between: Wrap | None = None, image: bytes = b"") -> None:
        self.rig = rig
        self.log = BlockLog(image)
        self._between = between
        self.numbers: set[int] = set()
        self.store = Path()
        """Where the store file lies below the path of the rig."""

    def session(self, steps: Iterable[Step], *, check: bool = True) -> None:
        """Open, carry out the steps, close."""
        between = self._between
        recording: Wrap = lambda io: RecordingIO(io, self.log)  # noqa: E731
        whole: Wrap = recording if between is None else lambda io: between(recording(io))
        steps = list(steps)
        self.numbers.update(number for _, numbers in steps for number in numbers)
        driver = self.rig.over(whole).open()
        try:
            carry_out(driver, steps, lambda number, status: self.log.mark((number, status)), check)
        finally:
            driver.close()
        self.store = self.rig.store.relative_to(self.rig.path)


def carry_out(driver: Driver, steps: Iterable[Step], tell: Tell, check: bool = True) -> None:
    """Submit every step, and ``tell`` of each chunk that something is asked for it, and what became of that.

    With ``check`` all of it has to go well.
    """
    waiting: list[tuple[Ticket[Any], str]] = []
    for what, numbers in steps:
        if what != "wait":
            waiting.append((_submit(driver, what.split()[-1], numbers, tell), what))
        if not what.startswith("begin"):
            for ticket, asked in waiting:
                driver.finish(ticket)
                assert not check or _went_well(ticket), f"{asked}: {told(*ticket.results)}"
            waiting.clear()


def _submit(driver: Driver, what: str, numbers: Sequence[int], tell: Tell) -> Ticket[Any]:
    ticket: Ticket[Any]
    if what == "read":
        return driver.submit_read([(key(number), chunk(number)[0].size) for number in numbers])[0]
    for number in numbers:
        tell(number, None)
    if what == "store":
        ticket, _ = driver.submit_write(chunks(numbers))
    else:
        ticket = driver.submit_delete([key(number) for number in numbers])

    def hear(done: Ticket[Any]) -> None:
        """In the thread that completes the ticket, so that nothing happens to the file meanwhile."""
        for number, result in zip(numbers, done.results, strict=True):
            tell(number, result.status)

    ticket.on_done(hear)
    return ticket


def _went_well(ticket: Ticket[Any]) -> bool:
    return all(result.status in _GOOD for result in ticket.results)


def promises(cut: PowerCut, before: Promises | None = None) -> Promises:
    """What had been promised when the power failed; ``before`` is what held already at the beginning."""
    found = Promises() if before is None else Promises(set(before.stored), set(before.deleted))
    for number, status in cast("Iterable[tuple[int, WriteStatus | DeleteStatus | None]]", cut.marks):
        if status is None:
            found.begin(number)
        else:
            found.hear(number, status)
    return found


@frozen
class Images:
    """Puts what a power cut may leave under a folder of its own, and opens it with the real backend."""

    rig: Rig

    @classmethod
    def beside(cls, rig: Rig) -> Images:
        return cls(evolve(rig, path=rig.path.with_name("image"), wrap=None))

    def put(self, recorded: Recording, image: bytes) -> None:
        shutil.rmtree(self.rig.path, ignore_errors=True)
        store = self.rig.path / recorded.store
        store.parent.mkdir(parents=True)
        with open(store, "wb", buffering=0) as file:
            file.truncate(len(image))
            for at in range(0, len(image), _STRIDE):
                part = image[at : at + _STRIDE]
                if part.count(0) != len(part):
                    file.seek(at)
                    file.write(part)


_STRIDE = 1 << 14


def judge(
    recording: Recording, choose: Callable[[PowerCut], Iterable[bytes]], before: Promises | None = None
) -> int:
    """Open whatever ``choose`` picks of each moment, once each, and give how many that were.

    Raises ``AssertionError`` for the first that does not keep what was promised by then.
    """
    images = Images.beside(recording.rig)
    seen: set[tuple[object, ...]] = set()
    last = b""
    for number, cut in enumerate(recording.log.cuts()):
        due = promises(cut, before)
        for image in choose(cut):
            last = last if image == last else image
            case = (last, frozenset(due.stored), frozenset(due.deleted))
            if case in seen:
                continue
            seen.add(case)
            images.put(recording, image)
            try:
                check(images.rig, due, recording.numbers)
            except AssertionError as error:
                error.add_note(f"after event {number}, with {due}\npending were {_told(cut)}")
                raise
    return len(seen)


def _told(cut: PowerCut) -> str:
    return ", ".join(
        f"{len(change.data)} bytes at {change.offset}" if isinstance(change, Write) else str(change)
        for change in cut.pending
    )
