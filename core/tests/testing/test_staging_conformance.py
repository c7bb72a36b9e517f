"""The suite for stagings, put to one that is right and to mistakes it must notice."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from kvferry.api import (
    ArenaOptions,
    ErrorKind,
    ItemResult,
    KVFerryError,
    Region,
    StageCopy,
    Staging,
    StagingContext,
    Ticket,
    TransferStatus,
)
from kvferry.plugins import LoadedPlugins, PluginRequest, load_plugins
from kvferry.testing.conformance import StagingConformance
from kvferry.testing.conformance.staging import CAPACITY, open_staging
from kvferry.testing.fake_distributions import distributions_in, fake_distribution, importable
from kvferry.testing.memory_staging import MemoryStaging, MemoryStagingOptions
from kvferry.testing.stagings import ForwardingStaging

PLUGIN = """
    from kvferry.api import Manifest, StagingSpec, hookimpl

    MANIFEST = Manifest(name="memory", api=">=1.0,<2", rule_prefix="MEM", summary="for a test")

    @hookimpl
    def kvferry_stagings():
        return [
            StagingSpec(
                name="memory",
                factory="kvferry.testing.memory_staging:MemoryStaging",
                options="kvferry.testing.memory_staging:MemoryStagingOptions",
            )
        ]
"""


class TestMemoryStaging(StagingConformance):
    plugin = "memory"
    staging = "memory"

    @pytest.fixture
    def plugins(self, tmp_path: Path) -> Iterator[LoadedPlugins]:
        fake_distribution(
            tmp_path, "memory", entry_points={"memory": "memory_entry"}, source={"memory_entry.py": PLUGIN}
        )
        with importable(tmp_path):
            found = load_plugins(
                [PluginRequest(name="memory")], distributions=lambda: distributions_in(tmp_path)
            )
            assert found.faults() == ()
            yield found


class Laws(StagingConformance):
    __test__ = False


def broken(make: Callable[[], Staging], laws: Collection[str]) -> Mapping[str, str]:
    """Of ``laws`` those that this staging breaks, and what they say."""
    found = {}
    for name, law in Laws.laws().items():
        given = set(inspect.signature(law).parameters) - {"self"}
        if name not in laws:
            continue
        opened = open_staging(make(), 5.0) if "opened" in given else None
        values = {"make": make, "opened": opened}
        try:
            law(Laws(), **{each: values[each] for each in given})
            if opened is not None and opened.tickets:
                opened.check()
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - that is what is asked for
            found[name] = str(error)
        finally:
            if opened is not None:
                with contextlib.suppress(KVFerryError):
                    opened.staging.close(time.monotonic() + 5.0)
    return found


def inner() -> MemoryStaging:
    return MemoryStaging(MemoryStagingOptions(), CAPACITY)


class Changing(ForwardingStaging):
    """Knows its context and its region."""

    context: StagingContext
    region: Region

    def open(self, context: StagingContext) -> Region:
        self.region = super().open(context)
        self.context = context
        return self.region


class SpillsOneByte(Changing):
    """Copies one byte too many."""

    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        longer = [
            copy._replace(source=copy.source._replace(length=copy.source.length + 1))
            if copy.source.length > 0 and copy.offset + copy.source.length < CAPACITY
            else copy
            for copy in copies
        ]
        return super().stage(longer, deadline)


class ForgetsTheLast(Changing):
    """Says of the last copy of a batch that it is done, and does not make it."""

    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        if len(copies) < 2:
            return super().stage(copies, deadline)
        ticket: Ticket[TransferStatus] = Ticket(len(copies))
        done = ItemResult(TransferStatus.DONE)
        super().stage(copies[:-1], deadline).on_done(lambda told: ticket.complete([*told.results, done]))
        ticket.on_cancel(lambda _: None)
        return ticket


class IgnoresCancelling(Changing):
    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        ticket: Ticket[TransferStatus] = Ticket(len(copies))
        super().stage(copies, deadline).on_done(lambda told: ticket.complete(told.results))
        return ticket


class IgnoresDeadlines(Changing):
    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        return super().stage(copies, float("inf"))


class WritesAfterTheEnd(Changing):
    """Writes what was cancelled a moment later all the same."""

    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        ticket = super().stage(copies, deadline)
        ticket.on_cancel(lambda _: threading.Timer(0.01, self._write, [copies[0]]).start())
        return ticket

    def _write(self, copy: StageCopy) -> None:
        source = self.context.regions[copy.source.region].address + copy.source.offset
        ctypes.memmove(self.region.address + copy.offset, source, min(copy.source.length, 4096))


class CompletesTwice(Changing):
    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        ticket = super().stage(copies, deadline)

        def again(told: Ticket[TransferStatus]) -> None:
            with contextlib.suppress(KVFerryError):
                told.complete(told.results)

        ticket.on_done(again)
        return ticket


class LeavesTicketsOpen(Changing):
    """Never tells of what was not done when it closed."""

    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        ticket: Ticket[TransferStatus] = Ticket(len(copies))

        def told(done: Ticket[TransferStatus]) -> None:
            errors = [result.error for result in done.results if result.error is not None]
            if not any(error.kind is ErrorKind.CLOSED for error in errors):
                ticket.complete(done.results)

        under_way = super().stage(copies, deadline)
        ticket.on_cancel(lambda _: under_way.cancel())
        under_way.on_done(told)
        return ticket


class WritesWhatIsNotThere(Changing):
    """Takes all of its memory to be there at once."""

    def open(self, context: StagingContext) -> Region:
        class Ready:
            def __init__(self, name: str, capacity: int, options: ArenaOptions) -> None:
                self._arena = context.make_arena(name, capacity, options)

            def open(self) -> Region:
                return self._arena.open()

            def ready_bytes(self) -> int:
                return CAPACITY

            def close(self) -> None:
                self._arena.close()

        return super().open(
            StagingContext(name=context.name, make_arena=Ready, regions=context.regions, clock=context.clock)
        )


LEFT_ALONE = "test_a_cancelled_ticket_ends_and_tells_the_truth"
EASY = "test_closing_gives_everything_back"


@pytest.mark.parametrize(
    ("staging", "law"),
    [
        (SpillsOneByte, "test_bytes_arrive_as_they_are"),
        (ForgetsTheLast, "test_bytes_arrive_as_they_are"),
        (IgnoresCancelling, "test_cancelling_ends_what_has_not_begun"),
        (IgnoresDeadlines, "test_of_a_batch_that_comes_too_late_no_byte_moves"),
        (WritesAfterTheEnd, LEFT_ALONE),
        (CompletesTwice, "test_bytes_arrive_as_they_are"),
        (LeavesTicketsOpen, "test_closing_ends_every_ticket"),
        (WritesWhatIsNotThere, "test_memory_that_is_not_there_yet_is_not_written"),
    ],
)
def test_a_mistake_breaks_the_law_that_is_about_it(staging: type[Changing], law: str) -> None:
    assert set(broken(lambda: staging(inner()), {law, EASY})) == {law}
