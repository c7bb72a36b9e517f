"""A scheduler side whose engine, workers and clock are the test itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.api import GroupGeometry, KVGeometry
from kvferry.control.identity import Namespace
from kvferry.control.keys import KeyChain
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.data.plans import Direction, StepPlan, Transfer, TransferResult
from kvferry.data.wire import WIRE_VERSION, Beat, Bye, Done, Hello, Ready
from kvferry.runtime import LoadMode, RequestOptions, RequestState, SchedulerRuntime
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.grain import GroupShape
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings, open_fake_instance
from kvferry.testing.leaks import LeakGuard

BLOCK, CHUNK = 4, 16
PER_CHUNK = CHUNK // BLOCK
LEASE_SECONDS, WRITE_SECONDS = 10.0, 20.0
NAMESPACE = Namespace(
    model="m",
    revision="1",
    geometry=KVGeometry(
        groups=(GroupGeometry(kind="full", layers=1, kv_heads=1, head_size=1, dtype="uint8"),),
        chunk_tokens=CHUNK,
    ),
)

Content = int
"""What a block holds: one number for its tokens, everything before them, and the tenant."""


class HandDriven:
    """One scheduler runtime with ranks that copy when the test says so, and fail as it says.

    Engine and tier are dictionaries per rank, so that every block that a load brought can be compared
    with what belongs there. Blocks of the engine are numbered without end and never used twice.
    Nothing here has a thread, and time passes when the test moves ``now``.
    """

    def __init__(self, slots: int, *, world_size: int = 1, events: int = 0) -> None:
        self.now = 0.0
        self.world_size = world_size
        self.manager = CacheManager(
            capacity=slots,
            chunk_tokens=CHUNK,
            block_tokens=BLOCK,
            policy=LRU(),
            lease_seconds=LEASE_SECONDS,
            write_seconds=WRITE_SECONDS,
            events=events,
        )
        self.runtime = SchedulerRuntime(
            self.manager,
            MeetingPlace("by-hand", "/nowhere", {}),
            world_size=world_size,
            fingerprint="f",
            chunk_tokens=CHUNK,
            groups=(GroupShape(BLOCK),),
            load_mode=LoadMode.ASYNC,
            save_generated=True,
            clock=lambda: self.now,
            events=events > 0,
        )
        self.requests: dict[str, RequestState] = {}
        self.tables: dict[str, list[int]] = {}
        self.engine: list[dict[int, Content]] = [{} for _ in range(world_size)]
        self.tier: list[dict[tuple[int, int], Content]] = [{} for _ in range(world_size)]
        self._blocks = 0
        for rank in range(world_size):
            hello = Hello(WIRE_VERSION, "t", rank, world_size, rank, "f", slots, 1)
            assert self.runtime.deliver(hello) is None
            self.runtime.deliver(Ready(rank, rank, slots))

    # The engine

    def add(self, name: str, tokens: Collection[int], *, salt: str = "", **options: bool) -> RequestState:
        state = RequestState(
            id=name,
            tokens=list(tokens),
            prompt_tokens=len(tokens),
            chain=KeyChain(NAMESPACE, salt=salt, lora=None),
            salt=salt,
            options=RequestOptions(**options),
        )
        self.requests[name] = state
        self.tables[name] = []
        self.runtime.add_request(state)
        return state

    def match(self, name: str, local: int = 0) -> int:
        state = self.requests[name]
        return self.runtime.match(name, local, state.preemptions, len(state.tokens))

    def allocate(self, name: str, external: int, local: int = 0) -> None:
        """The engine holds ``local`` tokens already and makes room for ``external`` more."""
        self._extend(name, local + external)
        self._hold(name, 0, local)
        if external:
            self.runtime.loads_beside(name)
        self.runtime.allocated(name, external, [self.tables[name]])

    def compute(self, name: str, start: int, end: int) -> None:
        """A step computes these tokens; the request gets what blocks it needs."""
        before = len(self.tables[name])
        self._extend(name, end)
        state = self.requests[name]
        new = [self.tables[name]] if not state.blocks else [self.tables[name][before:]]
        self._hold(name, start, end)
        self.runtime.scheduled(
            name, end, new, replace_blocks=False, known_tokens=len(state.tokens), computed_before=start
        )

    def finish(self, name: str, computed: int | None = None) -> bool:
        """The request ends; whether the engine must keep its blocks."""
        state = self.requests.pop(name)
        computed = len(state.tokens) if computed is None else computed
        return self.runtime.finished(name, [self.tables[name]], computed, len(state.tokens))

    def plan(self) -> StepPlan:
        return self.runtime.step_plan(self.requests)

    def store(self, name: str, tokens: Collection[int], *, salt: str = "", load: bool = False) -> None:
        """A request from its beginning to its end, with nothing that fails."""
        self.add(name, tokens, salt=salt, load=load)
        self.compute(name, 0, len(tokens))
        self.finish(name)
        for transfer in self.plan().saves:
            self.report(transfer)

    def hit(self, tokens: Collection[int], *, salt: str = "") -> int:
        """Tokens that a new request with this prompt finds and restores, all of which are checked."""
        state = self.add("hit", tokens, salt=salt, store=False)
        found = self.match("hit")
        if found:
            self.allocate("hit", found)
            for transfer in self.plan().loads:
                self.report(transfer)
            self.check_loaded(state, 0, found)
        self.finish("hit", computed=found)
        self.plan()
        return found

    def digests(self, tokens: Collection[int]) -> list[bytes]:
        """The digests of the full chunks of a prompt without a salt."""
        chain = KeyChain(NAMESPACE, salt="", lora=None)
        chain.extend(list(tokens))
        return chain.keys

    def content(self, state: RequestState, index: int) -> Content:
        """What block ``index`` of a request must hold."""
        return hash((state.salt, *state.tokens[: (index + 1) * BLOCK]))

    def check_loaded(self, state: RequestState, start: int, end: int) -> None:
        for rank in range(self.world_size):
            for index in range(start // BLOCK, end // BLOCK):
                block = self.tables[state.id][index]
                assert self.engine[rank].get(block) == self.content(state, index), (rank, index)

    def _extend(self, name: str, tokens: int) -> None:
        table = self.tables[name]
        while len(table) * BLOCK < tokens:
            table.append(self._blocks)
            self._blocks += 1

    def _hold(self, name: str, start: int, end: int) -> None:
        """The engine's blocks hold what was computed, up to the last whole one."""
        state = self.requests[name]
        for index in range(start // BLOCK, end // BLOCK):
            for engine in self.engine:
                engine[self.tables[name][index]] = self.content(state, index)

    # The workers

    def report(
        self,
        transfer: Transfer,
        ranks: Collection[int] | None = None,
        failed: Collection[int] = (),
    ) -> None:
        """These ranks (all if none are named) copy a transfer and say so. Of ``failed`` slots nothing
        is copied, and it is said."""
        for rank in range(self.world_size) if ranks is None else ranks:
            engine, tier = self.engine[rank], self.tier[rank]
            (rows,) = transfer.groups
            columns = (rows.slot_column, rows.position_column, rows.block_column)
            for slot, position, block in zip(*(column.tolist() for column in columns), strict=True):
                if slot in failed:
                    continue
                if transfer.direction is Direction.SAVE:
                    tier[slot, position] = engine[block]
                else:
                    engine[block] = tier[slot, position]
            self.tell(rank, TransferResult(transfer.id, tuple(sorted(failed))))

    def tell(self, rank: int, result: TransferResult) -> None:
        """A rank's message, whatever it copied."""
        self.runtime.deliver(Done(rank, rank, (result,)))

    def wait(self, seconds: float) -> None:
        """Time passes; the workers are heard of, and timers run."""
        self.now += seconds
        for rank in range(self.world_size):
            self.runtime.deliver(Beat(rank, rank))
        self.runtime.run_timers()

    def leave(self) -> None:
        """All workers end in order."""
        for rank in range(self.world_size):
            self.runtime.deliver(Bye(rank, rank))

    def check(self, resident: int | None = None) -> None:
        """Nothing is out, the books agree, and every slot is free or holds a chunk."""
        self.manager.check()
        stats = self.manager.stats()
        out = (stats.leases, stats.reservations, stats.leased, stats.retiring)
        assert out == (0, 0, 0, 0), stats
        assert stats.free + stats.resident == stats.capacity, stats
        assert resident is None or stats.resident == resident, stats


@pytest.fixture
def by_hand(leak_guard: LeakGuard) -> Callable[..., HandDriven]:
    """Makes a scheduler side that the test drives by hand."""

    def make(slots: int, **more: Any) -> HandDriven:
        driven = HandDriven(slots, **more)
        leak_guard.watch(driven.manager)
        return driven

    return make


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kf") as name:
        yield Path(name)


@pytest.fixture
def open_instance(folder: Path, leak_guard: LeakGuard) -> Iterator[Callable[..., FakeInstance]]:
    """Opens an instance around a fake engine until the end of the test."""
    with ExitStack() as stack:

        def open_(settings: InstanceSettings | None = None, **more: Any) -> FakeInstance:
            return stack.enter_context(open_fake_instance(folder, settings, watch=leak_guard.watch, **more))

        yield open_
