"""Manager and tier live in a process of their own; the engine maps the tier's memory."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvferry.api import Region
from kvferry.data.copy import NumpyCopier
from kvferry.data.engine_side import EngineSide
from kvferry.data.handover import recv_fd
from kvferry.data.mapping import MappedRegion, map_region
from kvferry.data.plans import StepPlan
from kvferry.runtime import RequestOptions, RequestState, WorkerRuntime
from kvferry.runtime.address import MeetingPlace
from kvferry.testing import fake_node as node
from kvferry.testing.fake_engine import EngineSettings, FakeEngine
from kvferry.testing.fake_instance import key_chains, wait_until
from kvferry.testing.fake_memory import FakeMemory


class RemoteScheduler:
    """Passes an engine's calls on to the other process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._requests: dict[str, tuple[Sequence[int], int]] = {}

    def _call(self, name: str, request_id: str = "", *arguments: object) -> bytes:
        tokens, told = self._requests.get(request_id, ((), 0))
        self._requests[request_id] = tokens, len(tokens)
        node.send(self._connection, [name, request_id, list(tokens[told:]), arguments])
        answer = node.receive(self._connection)
        assert answer, "the node died"
        return answer

    def add_request(self, state: RequestState) -> None:
        self._requests[state.id] = state.tokens, 0
        self._call("add_request", state.id, state.salt, state.options.store, state.options.load)

    def match(self, request_id: str, local: int, preemptions: int, tokens: int) -> int:
        return msgspec.msgpack.decode(self._call("match", request_id, local, preemptions, tokens), type=int)

    def allocated(self, request_id: str, external: int, blocks: Sequence[Sequence[int]]) -> None:
        self._call("allocated", request_id, external, blocks)

    def preempted(self, request_id: str) -> None:
        self._call("preempted", request_id)

    def scheduled(
        self,
        request_id: str,
        computed: int,
        blocks: Sequence[Sequence[int]] | None,
        *,
        replace_blocks: bool,
        known_tokens: int,
        computed_before: int,
    ) -> None:
        self._call("scheduled", request_id, computed, blocks, replace_blocks, known_tokens, computed_before)

    def finished(self, request_id: str, blocks: Sequence[Sequence[int]], computed: int, known: int) -> bool:
        answer = self._call("finished", request_id, blocks, computed, known)
        return msgspec.msgpack.decode(answer, type=bool)

    def loads_beside(self, request_id: str) -> bool:
        return msgspec.msgpack.decode(self._call("loads_beside", request_id), type=bool)

    def step_plan(self, running: Sequence[str]) -> StepPlan:
        return msgspec.msgpack.decode(self._call("step_plan", "", running), type=StepPlan)

    def statistics(self) -> list[int]:
        """Loaded tokens, resident chunks, leases, reservations."""
        return msgspec.msgpack.decode(self._call("statistics"), type=list[int])


class MappedStore:
    """Another process's tier, seen through its memory file."""

    def __init__(self, mapped: MappedRegion, slots: int) -> None:
        self._mapped = mapped
        self.slots = slots

    def open(self, on_ready: Callable[[], None]) -> Region:
        del on_ready  # the node hands its memory over when all of it is ready
        return self._mapped.region

    def ready_slots(self) -> int:
        return self.slots

    def close(self) -> None:
        self._mapped.close()


def test_an_engine_uses_a_tier_that_another_process_owns(folder: Path) -> None:
    settings = EngineSettings(prefix_cache=False)
    memory = FakeMemory(node.SETTINGS.groups, blocks=settings.pool_blocks(1), block_tokens=node.BLOCK)
    side = EngineSide(memory.engine_groups(), node.CHUNK)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "hand"))
    listener.listen()
    command: list[Any] = [sys.executable, "-m", node.__name__, folder / "hand", folder]
    command.append(side.layout.total_bytes)
    with (
        listener,
        subprocess.Popen([str(word) for word in command]) as process,
    ):
        listener.settimeout(30.0)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(30.0)
            message, fd = recv_fd(connection)
            arena = msgspec.msgpack.decode(message, type=node.Arena)
            store = MappedStore(map_region(fd, arena.length, "tier"), arena.slots)
            worker = WorkerRuntime(
                side,
                store,
                NumpyCopier(),
                MeetingPlace("node", str(folder), {}),
                rank=0,
                world_size=1,
                epoch=5,
                fingerprint="fake",
            )
            worker.open()
            scheduler = RemoteScheduler(connection)
            engine = FakeEngine(
                settings,
                scheduler,  # type: ignore[arg-type]
                [worker],
                [memory],
                key_chains(node.SETTINGS),
            )
            try:
                _live(engine, scheduler)
            finally:
                worker.close()
        assert process.wait(30.0) == 0


def _live(engine: FakeEngine, scheduler: RemoteScheduler) -> None:
    """The engine checks every byte that comes back through the other process's memory."""

    def stored() -> bool:
        # Until the worker was heard of, nothing is stored.
        engine.add(range(3 * node.CHUNK + 2), new_tokens=3)
        engine.run()
        return scheduler.statistics()[1] > 0

    wait_until(stored, 30.0, "nothing was stored")
    wait_until(lambda: scheduler.statistics()[2:] == [0, 0], 30.0, "a lease stayed")
    request = engine.add(range(3 * node.CHUNK + 2), new_tokens=3, options=RequestOptions(store=False))
    engine.run()
    assert sum(request.hits) == 3 * node.CHUNK
    aborted = engine.add(range(3 * node.CHUNK + 2), new_tokens=3)
    engine.step()
    engine.abort(aborted)
    # More than the tier holds, so that slots are used again.
    for family in range(1, 8):
        engine.add(range(1000 * family, 1000 * family + 3 * node.CHUNK + 1), new_tokens=20)
        engine.run()
    wait_until(lambda: scheduler.statistics()[2:] == [0, 0], 30.0, "a save without a result")
    again = engine.add(range(7000, 7000 + 3 * node.CHUNK + 1), new_tokens=20)
    engine.run()
    assert sum(again.hits) == 3 * node.CHUNK
    wait_until(lambda: scheduler.statistics()[2:] == [0, 0], 30.0, "a lease stayed")
    assert scheduler.statistics()[0] > 0
