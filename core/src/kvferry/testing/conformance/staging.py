"""What every staging promises."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
from attrs import define, evolve, field

from kvferry.api import (
    ArenaOptions,
    ErrorKind,
    ItemResult,
    KVFerryError,
    MemoryKind,
    Region,
    Span,
    StageCopy,
    Staging,
    StagingContext,
    StagingSpec,
    Ticket,
    TransferStatus,
)
from kvferry.data.arena import MemoryFileArena
from kvferry.plugins import LoadedPlugins
from kvferry.testing.conformance.base import Conformance
from kvferry.testing.conformance.subject import load_plugin
from kvferry.testing.guarded import GuardedMemory
from kvferry.testing.leaks import LeakGuard

CAPACITY = 8 << 20
"""Bytes of every staging; some laws fill it."""
SOURCE = "source"
_SOURCE_BYTES = 16 << 20
_A_MOMENT = 0.05
"""Seconds in which somebody who writes too late would do it."""


@define
class OpenStaging:
    """A staging, the memory that is copied from, and what has to lie in its region by now."""

    staging: Staging
    region: Region
    context: StagingContext
    source: GuardedMemory
    patience: float
    tickets: list[Ticket[TransferStatus]] = field(factory=list)
    _expected: bytearray = field(init=False)

    def __attrs_post_init__(self) -> None:
        ctypes.memset(self.region.address, 0x5A, self.region.length)
        self._expected = bytearray(b"\x5a") * self.region.length

    def bytes_at(self, offset: int, length: int) -> bytes:
        return ctypes.string_at(self.region.address + offset, length)

    def copy(self, data: bytes, offset: int) -> StageCopy:
        """Of memory that holds ``data``."""
        return StageCopy(self.source.take(data), offset)

    def submit(self, copies: Sequence[StageCopy], seconds: float | None = None) -> Ticket[TransferStatus]:
        limit = self.patience if seconds is None else seconds
        self.tickets.append(self.staging.stage(copies, self.context.clock() + limit))
        return self.tickets[-1]

    def settle(
        self, ticket: Ticket[TransferStatus], copies: Sequence[StageCopy], *, scribble: bool = False
    ) -> tuple[ItemResult[TransferStatus], ...]:
        """Wait for the end. What is done has to be in place; from now on every byte has to stay. With
        ``scribble`` others are put there, as by somebody who uses the memory again."""
        assert ticket.wait(self.patience), "a ticket does not end"
        assert len(ticket.results) == len(copies)
        for copy, result in zip(copies, ticket.results, strict=True):
            if result.status is TransferStatus.DONE:
                found = self.bytes_at(copy.offset, copy.source.length)
                assert found == self.source.bytes_of(copy.source), f"{copy} is done and the bytes are others"
        for copy in copies:
            at, length = copy.offset, copy.source.length
            if 0 <= at <= at + length <= self.region.length:
                if scribble:
                    ctypes.memset(self.region.address + at, 0xC3, length)
                self._expected[at : at + length] = self.bytes_at(at, length)
        return ticket.results

    def run(self, copies: Sequence[StageCopy]) -> tuple[ItemResult[TransferStatus], ...]:
        return self.settle(self.submit(copies), copies)

    def done(self, copies: Sequence[StageCopy]) -> None:
        """All of it is copied."""
        for copy, result in zip(copies, self.run(copies), strict=True):
            assert result.status is TransferStatus.DONE, f"{copy} failed: {result.error}"

    def check(self) -> None:
        """Every byte is as it was left, and no ticket ended twice."""
        found = self.bytes_at(0, self.region.length)
        if found != self._expected:
            wrong = next(
                at for at, pair in enumerate(zip(found, self._expected, strict=True)) if len({*pair}) > 1
            )
            pytest.fail(f"byte {wrong} of the staging was written, and no copy that is under way names it")
        assert self.source.trespasses() == [], "memory was written that is copied from"
        assert [ticket.completions for ticket in self.tickets] == [1] * len(self.tickets)


class StagingConformance(Conformance, kit=True):
    """``plugin`` and ``staging`` are the names that a configuration uses: ``plugins: [plugin]`` and
    ``staging: {use: staging}``. They are all it needs, if the options have defaults."""

    plugin: ClassVar[str]
    staging: ClassVar[str]
    patience: ClassVar[float] = 30.0
    """Seconds after which something that should end is taken for hanging."""

    @pytest.fixture
    def plugins(self) -> LoadedPlugins:
        """The plugin, loaded as core does it."""
        return load_plugin(self.plugin)

    @pytest.fixture
    def spec(self, plugins: LoadedPlugins) -> StagingSpec:
        """The description that is put to the proof."""
        return plugins.staging(self.staging)

    @pytest.fixture
    def options(self, plugins: LoadedPlugins) -> Any:
        """The staging's options. The defaults; override it to give others."""
        options_class = plugins.options_class("staging", self.staging)
        assert options_class is not None
        return options_class()

    @pytest.fixture
    def make(self, plugins: LoadedPlugins, options: Any) -> Callable[[], Staging]:
        """Makes a closed staging, as core does it."""
        factory = plugins.factory("staging", self.staging)
        return lambda: factory(options, CAPACITY)

    @pytest.fixture
    def opened(self, make: Callable[[], Staging]) -> Iterator[OpenStaging]:
        """An open staging whose memory is all there; every byte of it is looked at in the end."""
        opened = open_staging(make(), self.patience)
        yield opened
        if opened.tickets:
            opened.check()
        opened.staging.close(opened.context.clock() + self.patience)

    def test_the_options_are_of_the_spec_s_class(self, plugins: LoadedPlugins, options: object) -> None:
        """The options are what core would make of the section."""
        options_class = plugins.options_class("staging", self.staging)
        assert options_class is not None
        assert isinstance(options, options_class), "the options fixture gives something else"

    def test_making_a_staging_has_no_effect(self, make: Callable[[], Staging]) -> None:
        """The constructor keeps values; threads and memory come with ``open``."""
        make()  # importing may leave what it likes
        guard = LeakGuard()
        kept = [make() for _ in range(3)]
        assert guard.leaks(settle_seconds=0.0) == []
        del kept

    def test_the_region_has_the_name_and_the_length_that_were_asked_for(self, opened: OpenStaging) -> None:
        """What ``open`` gives is called as the context says, and is exactly as long as the capacity."""
        assert (opened.region.name, opened.region.length) == (opened.context.name, CAPACITY)

    def test_bytes_arrive_as_they_are(self, opened: OpenStaging) -> None:
        """Whatever the lengths, and wherever copies begin and end."""
        lengths = (1, 7, 63, 64, 65, 4095, 4096, 4097, 100_003)
        copies, at = [], 3
        for number, length in enumerate(lengths):
            copies.append(opened.copy(random.Random(number).randbytes(length), at))
            at += length + number % 3
        opened.done(copies)

    def test_the_first_and_the_last_byte_can_be_filled(self, opened: OpenStaging) -> None:
        """The whole of the region may be used."""
        opened.done([opened.copy(b"first", 0), opened.copy(b"last", CAPACITY - 4)])

    def test_a_copy_of_no_length_is_done(self, opened: OpenStaging) -> None:
        """Also at the end of the region."""
        opened.done([opened.copy(b"", 0), opened.copy(b"", CAPACITY), opened.copy(b"x", 5)])
        opened.done([])

    def test_many_small_copies_may_be_in_a_batch(self, opened: OpenStaging) -> None:
        """Each arrives."""
        opened.done([opened.copy(number.to_bytes(4, "big") * 9, 40 * number) for number in range(3000)])

    def test_a_large_copy_is_whole(self, opened: OpenStaging) -> None:
        """As large as the region."""
        opened.done([opened.copy(random.Random(0).randbytes(CAPACITY), 0)])

    def test_one_wrong_copy_leaves_the_others_alone(self, opened: OpenStaging) -> None:
        """What leaves a region, here or there, fails with the kind ``PROTOCOL``; the rest is done."""
        good = [opened.copy(b"one", 0), opened.copy(b"two", 100)]
        length = opened.source.length
        wrong = [
            StageCopy(Span(SOURCE, length - 4, 8), 200),
            StageCopy(Span(SOURCE, -1, 8), 200),
            StageCopy(Span(SOURCE, 0, -8), 200),
            StageCopy(Span("nothing", 0, 8), 200),
            _elsewhere(good[0], CAPACITY - 2),
            _elsewhere(good[0], -1),
        ]
        copies = [good[0], *wrong, good[1]]
        first, *others, last = opened.run(copies)
        assert first.status is last.status is TransferStatus.DONE
        assert [result.error and result.error.kind for result in others] == [ErrorKind.PROTOCOL] * len(wrong)

    def test_memory_that_is_not_the_host_s_is_copied_or_refused(self, make: Callable[[], Staging]) -> None:
        """A staging that cannot read a device's memory says ``UNSUPPORTED``, and touches nothing."""
        staging = make()
        # There is no memory at this address: whoever reads it does not end well.
        nowhere = Region(name="device", address=8, length=4096, kind=MemoryKind.DEVICE)
        opened = open_staging(staging, self.patience, nowhere)
        try:
            (result,) = opened.run([StageCopy(Span("device", 0, 4096), 0)])
            assert result.error is not None
            assert result.error.kind is ErrorKind.UNSUPPORTED
            opened.check()
        finally:
            staging.close(opened.context.clock() + self.patience)

    def test_many_tickets_may_be_under_way(self, opened: OpenStaging) -> None:
        """Of several threads, each with batches of its own; each ticket ends once."""
        batches = [
            [opened.copy(random.Random(n).randbytes(3000), 10_000 * n + 4000 * k) for k in range(2)]
            for n in range(40)
        ]
        tickets: dict[int, Ticket[TransferStatus]] = {}

        def submit(first: int) -> None:
            for number in range(first, len(batches), 4):
                tickets[number] = opened.submit(batches[number])

        threads = [threading.Thread(target=submit, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, batch in enumerate(batches):
            for result in opened.settle(tickets[number], batch, scribble=True):
                assert result.status is TransferStatus.DONE

    def test_a_cancelled_ticket_ends_and_tells_the_truth(self, opened: OpenStaging) -> None:
        """Each copy is in place or failed with the kind ``CANCELLED``, and nothing is written afterwards."""
        part = CAPACITY // 8
        span = opened.source.take(random.Random(0).randbytes(part))
        cut_short = 0
        for turn in range(60):  # on a machine that is busy many are done before they are cancelled
            copies = [StageCopy(span, turn % 6 * part)] * 8
            ticket = opened.submit(copies)
            time.sleep(0.001 * (turn % 2))
            ticket.cancel()
            results = opened.settle(ticket, copies, scribble=True)
            assert all(each.error is None or each.error.kind is ErrorKind.CANCELLED for each in results)
            cut_short += any(each.error is not None for each in results)
            opened.done([opened.copy(b"another", 7 * part)])
            if turn >= 5 and cut_short >= 3:
                break
        time.sleep(_A_MOMENT)

    def test_cancelling_ends_what_has_not_begun(self, opened: OpenStaging) -> None:
        """Of much work that is cancelled at once, not all is done first."""
        quarter = CAPACITY // 4
        span = opened.source.take(random.Random(0).randbytes(quarter))
        copies = [StageCopy(span, quarter * number) for number in range(4)] * 16
        # On a machine that is busy everything may be done before it is cancelled.
        assert any(self._some_cancelled(opened, copies) for _ in range(5)), "every copy was done first"

    def test_cancelling_after_the_end_changes_nothing(self, opened: OpenStaging) -> None:
        """Results stand once they are told."""
        copies = [opened.copy(b"data", 0)]
        ticket = opened.submit(copies)
        before = opened.settle(ticket, copies)
        ticket.cancel()
        assert ticket.results == before
        opened.done(copies)

    def test_of_a_batch_that_comes_too_late_no_byte_moves(self, opened: OpenStaging) -> None:
        """It fails with the kind ``TIMEOUT``."""
        copies = [opened.copy(b"data", 40 * number) for number in range(3)]
        for result in opened.settle(opened.submit(copies, -1.0), copies):
            assert result.error is not None
            assert result.error.kind is ErrorKind.TIMEOUT
        assert opened.bytes_at(0, 200) == b"\x5a" * 200
        opened.done(copies)

    def test_a_batch_ends_soon_after_its_deadline(self, opened: OpenStaging) -> None:
        """What is there by then is the beginning of the batch."""
        quarter = CAPACITY // 4
        span = opened.source.take(random.Random(0).randbytes(quarter))
        copies = [StageCopy(span, quarter * (number % 4)) for number in range(400)]
        kinds = [
            result.error and result.error.kind
            for result in opened.settle(opened.submit(copies, 0.02), copies)
        ]
        done = kinds.index(ErrorKind.TIMEOUT) if ErrorKind.TIMEOUT in kinds else len(kinds)
        assert kinds == [None] * done + [ErrorKind.TIMEOUT] * (len(kinds) - done)

    def test_closing_ends_every_ticket(self, make: Callable[[], Staging]) -> None:
        """When ``close`` returns nothing is under way: what did not happen failed with ``CLOSED``."""
        guard = LeakGuard()
        opened = open_staging(make(), self.patience)
        span = opened.source.take(random.Random(0).randbytes(CAPACITY // 2))
        tickets = [opened.submit([StageCopy(span, 0)] * 4) for _ in range(12)]
        opened.staging.close(opened.context.clock() + self.patience)
        for ticket in tickets:
            assert ticket.done, "close returned and left a ticket open"
            for result in ticket.results:
                assert result.error is None or result.error.kind is ErrorKind.CLOSED
            assert ticket.completions == 1
        opened.staging.close(opened.context.clock())
        del opened
        assert guard.leaks() == []

    def test_closing_gives_everything_back(self, make: Callable[[], Staging]) -> None:
        """No thread, descriptor or memory is left, also when the memory was not all there yet."""
        guard = LeakGuard()
        staging = make()
        context = _context()
        staging.open(context)
        staging.close(context.clock() + self.patience)
        staging.close(context.clock())
        assert guard.leaks() == []

    def test_what_was_never_open_can_be_closed(self, make: Callable[[], Staging]) -> None:
        """``close`` needs no ``open``."""
        make().close(time.monotonic() + self.patience)

    def test_only_an_open_staging_takes_work(self, make: Callable[[], Staging]) -> None:
        """Before ``open`` and after ``close`` it is refused with the kind ``CLOSED``."""
        staging = make()
        for _ in range(2):
            with pytest.raises(KVFerryError) as caught:
                staging.stage([StageCopy(Span(SOURCE, 0, 8), 0)], time.monotonic() + 1.0)
            assert caught.value.kind is ErrorKind.CLOSED
            staging.close(time.monotonic() + self.patience)

    def test_opening_twice_is_refused(self, opened: OpenStaging) -> None:
        """A second ``open`` raises, and the first stays good."""
        with pytest.raises(KVFerryError) as caught:
            opened.staging.open(opened.context)
        assert caught.value.kind is ErrorKind.INTERNAL
        opened.done([opened.copy(b"data", 0)])

    def test_a_refusal_is_passed_on(self, make: Callable[[], Staging]) -> None:
        """The memory comes from the context's ``make_arena``; when that refuses, ``open`` raises what it was
        told and leaves nothing open."""
        staging, guard = make(), LeakGuard()
        with pytest.raises(KVFerryError) as caught:
            staging.open(evolve(_context(), make_arena=lambda *_: _RefusingArena()))
        assert caught.value.kind is ErrorKind.CAPACITY
        staging.close(time.monotonic() + self.patience)
        assert guard.leaks() == []

    def test_memory_that_is_not_there_yet_is_not_written(self, make: Callable[[], Staging]) -> None:
        """A copy into a part of the arena that is not ready fails with the kind ``CAPACITY``: the machine may
        have no memory for it."""
        arenas: list[_SlowArena] = []

        def make_arena(name: str, capacity: int, options: ArenaOptions) -> _SlowArena:
            arenas.append(_SlowArena(MemoryFileArena(name, capacity, options)))
            return arenas[-1]

        opened = open_staging(make(), self.patience, make_arena=make_arena)
        try:
            (arena,) = arenas
            arena.ready = 4096
            copies = [opened.copy(b"ready", 4096 - 5), opened.copy(b"not", 4096 - 2)]
            good, early = opened.run(copies)
            assert good.status is TransferStatus.DONE
            assert early.error is not None
            assert early.error.kind is ErrorKind.CAPACITY
            arena.ready = CAPACITY
            opened.done(copies[1:])
            opened.check()
        finally:
            opened.staging.close(opened.context.clock() + self.patience)

    def _some_cancelled(self, opened: OpenStaging, copies: Sequence[StageCopy]) -> bool:
        under_way = [opened.submit(copies) for _ in range(4)]
        for ticket in reversed(under_way):
            ticket.cancel()
        results = [result for ticket in under_way for result in opened.settle(ticket, copies)]
        failed = [result.error for result in results if result.error is not None]
        assert all(error.kind is ErrorKind.CANCELLED for error in failed)
        return bool(failed)


class _RefusingArena:
    """Memory that is not to be had."""

    def open(self) -> Region:
        raise KVFerryError("there is no memory", kind=ErrorKind.CAPACITY, where="conformance suite")

    def ready_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


@define
class _SlowArena:
    """Memory of which no more than ``ready`` bytes are told to be there."""

    inner: MemoryFileArena
    ready: int = CAPACITY

    def open(self) -> Region:
        return self.inner.open()

    def ready_bytes(self) -> int:
        return min(self.ready, self.inner.ready_bytes())

    def close(self) -> None:
        self.inner.close()


def _elsewhere(copy: StageCopy, offset: int) -> StageCopy:
    return copy._replace(offset=offset)


def _context(*regions: Region, make_arena: Callable[..., Any] = MemoryFileArena) -> StagingContext:
    return StagingContext(
        name="staging", make_arena=make_arena, regions={region.name: region for region in regions}
    )


def open_staging(
    staging: Staging,
    patience: float,
    *regions: Region,
    make_arena: Callable[..., Any] = MemoryFileArena,
) -> OpenStaging:
    """Open it, and wait until its memory is there."""
    source = GuardedMemory(SOURCE, _SOURCE_BYTES)
    context = _context(source.region, *regions, make_arena=make_arena)
    region = staging.open(context)
    source.settle(last := source.take(b"x"))
    deadline = time.monotonic() + patience
    while True:
        ticket = staging.stage([StageCopy(last, CAPACITY - 1)], context.clock() + patience)
        assert ticket.wait(patience), "a ticket does not end"
        error = ticket.results[0].error
        if error is None:
            return OpenStaging(staging, region, context, source, patience)
        assert error.kind is ErrorKind.CAPACITY, str(error)
        assert time.monotonic() < deadline, f"the memory never came: {error}"
        time.sleep(0.001)
