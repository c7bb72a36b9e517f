"""Ranks and groups agree: on how long a hit is, on what a load brought, and on who reads which block."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.api import ArenaOptions, BackendContext, Region
from kvferry.data.copy import NumpyCopier, SpanCopier
from kvferry.data.plans import Direction, TransferResult
from kvferry.data.store_side import StoreSide
from kvferry.data.wire import WIRE_VERSION, Done, Hello, Ready
from kvferry.runtime import LoadMode, RequestOptions
from kvferry.runtime.worker import FLUSH_SECONDS
from kvferry.testing.backends import MemoryBackend
from kvferry.testing.copiers import FaultyCopier, SlowCopier
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings
from kvferry.testing.fake_memory import FakeGroup
from kvferry.testing.fake_requests import FakeRequest

BLOCK, CHUNK = 4, 16
NO_STORE = RequestOptions(store=False)
TOPOLOGIES = list(itertools.product((1, 2), repeat=2))
"""Tensor and pipeline parallel sizes."""

properties = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def text(name: int, tokens: int) -> list[int]:
    return [name * 10_000 + position for position in range(tokens)]


# -- ranks: one truth about every chunk ----------------------------------------------------------


@properties
@given(chunks=st.integers(1, 6), draws=st.data())
def test_what_one_rank_lost_no_rank_finds(by_hand: Any, chunks: int, draws: st.DataObject) -> None:
    """A hit is the shortest of all ranks, not what the first or any rank has (LMCache#1101,
    LMCache#4207)."""
    rank = draws.draw(st.integers(0, 3), "the rank")
    bad = draws.draw(st.integers(0, chunks - 1), "the chunk that it lost")
    driven = by_hand(8, world_size=4)
    prompt = text(1, chunks * CHUNK + 1)
    driven.store("a", prompt)
    driven.add("b", prompt, store=False)
    found = driven.match("b")
    assert found == chunks * CHUNK
    driven.allocate("b", found)
    (transfer,) = driven.plan().loads
    slots = list(dict.fromkeys(transfer.groups[0].slot_column.tolist()))
    for each in range(4):
        driven.report(transfer, ranks=[each], failed=[slots[bad]] if each == rank else [])
    driven.finish("b", computed=0)
    driven.check(resident=bad)
    assert driven.hit(prompt) == bad * CHUNK
    driven.store("c", prompt)
    assert driven.hit(prompt) == found


@pytest.mark.parametrize(("tensor", "pipeline"), TOPOLOGIES)
def test_a_load_is_over_when_its_last_reader_is(by_hand: Any, tensor: int, pipeline: int) -> None:
    """Every rank of every stage reads, whoever wrote, and gives back once: latents too, which all tensor
    parallel ranks hold alike (LMCache#1357, LMCache#2697)."""
    world_size = tensor * pipeline
    for last in range(world_size):
        driven = by_hand(4, world_size=world_size)
        prompt = text(1, 2 * CHUNK + 1)
        driven.store("a", prompt)
        state = driven.add("b", prompt, store=False)
        driven.allocate("b", driven.match("b"))
        (transfer,) = driven.plan().loads
        for rank in (*(rank for rank in range(world_size) if rank != last), last):
            assert driven.manager.stats().leased == 2
            assert driven.manager.evict(4) == 0, "taken from under a rank that reads"
            driven.report(transfer, ranks=[rank])
            if rank != last:
                driven.tell(rank, TransferResult(transfer.id, ()))  # a doubled message is no other rank
        driven.check_loaded(state, 0, 2 * CHUNK)
        driven.finish("b", computed=2 * CHUNK)
        driven.check(resident=2)
        assert driven.manager.evict(4) == 2


class Recorder:
    """A tier that keeps what it was opened with."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.context: BackendContext | None = None

    def open(self, context: BackendContext) -> Region:
        self.context = context
        self._arena = context.make_arena(context.name, self._capacity, ArenaOptions())
        return self._arena.open()

    def ready_bytes(self) -> int:
        return self._arena.ready_bytes()

    def close(self) -> None:
        self._arena.close()


@pytest.mark.parametrize(("tensor", "pipeline"), TOPOLOGIES)
def test_no_two_ranks_open_one_place(tensor: int, pipeline: int) -> None:
    """One coordinate left out, and two ranks write their halves of a chunk over each other
    (sglang#26670)."""
    opened = []
    for rank in range(tensor * pipeline):
        tier = Recorder(1 << 16)
        store = StoreSide("tier", tier, 1 << 12, rank)
        store.open(lambda: None)
        assert tier.context is not None
        opened.append((tier.context.name, tier.context.rank))
        store.close()
    assert len(set(opened)) == tensor * pipeline


@pytest.mark.parametrize(("tensor", "pipeline"), TOPOLOGIES)
def test_a_second_worker_with_a_rank_that_is_taken_is_refused_and_changes_nothing(
    by_hand: Any, tensor: int, pipeline: int
) -> None:
    """Whoever leaves out a coordinate claims the rank of another (vllm-ascend#11478)."""
    world_size = tensor * pipeline
    driven = by_hand(4, world_size=world_size)
    prompt = text(1, 2 * CHUNK + 1)
    driven.add("a", prompt)
    driven.compute("a", 0, len(prompt))
    driven.finish("a")
    (transfer,) = driven.plan().saves
    for rank in range(world_size):
        stranger = 1000 + rank
        hello = Hello(WIRE_VERSION, "t", rank, world_size, stranger, "f", 4, 1)
        assert "was here before" in (driven.runtime.deliver(hello) or "")
        driven.runtime.deliver(Ready(rank, stranger, 0))
        driven.runtime.deliver(Done(rank, stranger, (TransferResult(transfer.id, ()),)))
    assert driven.manager.stats().resident == 0, "stored by workers that are none"
    for other in {1, 2, 4, 8} - {world_size}:
        hello = Hello(WIRE_VERSION, "t", 0, other, 0, "f", 4, 1)
        assert f"the scheduler has {world_size}" in (driven.runtime.deliver(hello) or "")
    assert driven.runtime.deliver(Hello(WIRE_VERSION, "t", world_size, world_size, 0, "f", 4, 1))
    driven.report(transfer)
    driven.check(resident=2)
    assert driven.hit(prompt) == 2 * CHUNK


# -- loads that fail: exactly what failed, wherever it did ----------------------------------------


class Faulty:
    """An instance with a copier of its own for each rank, each of which may fail."""

    def __init__(self, open_instance: Any, engine: EngineSettings, **more: Any) -> None:
        self.copiers: list[FaultyCopier] = []
        self.instance: FakeInstance = open_instance(
            InstanceSettings(engine=engine, **more), make_copier=self._make_copier
        )

    def _make_copier(self, rank: int, backend: MemoryBackend, slot_bytes: int) -> SpanCopier:
        assert rank == len(self.copiers)
        self.copiers.append(FaultyCopier(NumpyCopier(), backend.opened, slot_bytes))
        self.copiers[-1].directions = {Direction.LOAD}
        return self.copiers[-1]

    def serve(self, *prompts: list[int], options: RequestOptions | None = None) -> list[FakeRequest]:
        """Requests that come together, to their end. The engine checks every byte that it reads."""
        requests = [self.instance.engine.add(prompt, options=options) for prompt in prompts]
        self.instance.engine.run()
        self.instance.settle()
        assert all(request.complete for request in requests)
        return requests

    def slots(self, prompt: list[int]) -> list[int]:
        """Where a stored prompt lies, chunk by chunk."""
        chain = self.instance.new_chain("", None)
        chain.extend(prompt)
        match = self.instance.manager.match(
            "test", chain.keys, lambda index: chain.tail_keys(index, BLOCK), 0.0, len(prompt)
        )
        assert match.lease is not None
        self.instance.manager.release(match.lease)
        return list(match.slots)


@pytest.mark.parametrize("load_mode", [LoadMode.ASYNC, LoadMode.SYNC])
@pytest.mark.parametrize("overlapping", [False, True], ids=["", "overlapping"])
def test_ranks_that_fail_in_different_chunks_are_all_believed(
    open_instance: Any, load_mode: LoadMode, overlapping: bool
) -> None:
    """What is computed again begins at the first block that is missing anywhere, and ends nowhere before
    the last (vllm#49250, vllm-ascend#12522)."""
    chunks, tail, world_size = 4, 2 * BLOCK, 3
    engine = EngineSettings(prefix_cache=False, step_tokens=200, load_mode=load_mode, overlapping=overlapping)
    faulty = Faulty(open_instance, engine, world_size=world_size)
    chance = random.Random(f"{load_mode} {overlapping}")
    for number in range(12):
        prompt = text(number, chunks * CHUNK + tail + 1)
        faulty.serve(prompt)
        slots = faulty.slots(prompt)
        assert len(slots) == chunks + 1
        bad = [{chunk for chunk in range(chunks + 1) if chance.random() < 0.25} for _ in range(world_size)]
        for copier, failing in zip(faulty.copiers, bad, strict=True):
            copier.fail_slots = {slots[chunk] for chunk in failing}
        (request,) = faulty.serve(prompt, options=NO_STORE)
        assert request.hits == [len(prompt) - 1], "the load was tried again"
        missing = {
            index
            for index in range((len(prompt) - 1) // BLOCK)
            if index * BLOCK // CHUNK in set().union(*bad)
        }
        # Ranks may be heard of one after the other; together they say exactly what is missing.
        reported = set().union(*request.failures)
        assert min(reported, default=None) == min(missing, default=None)
        assert reported <= missing
        if load_mode is LoadMode.SYNC:
            assert reported == missing
        for copier in faulty.copiers:
            copier.fail_slots = set()
        (again,) = faulty.serve(prompt, options=NO_STORE)
        first = min(set().union(*bad), default=chunks)
        assert sum(again.hits) == (first * CHUNK if missing else len(prompt) - 1)
    faulty.instance.check_idle()


@pytest.mark.parametrize("overlapping", [False, True], ids=["", "overlapping"])
@pytest.mark.parametrize("chunk", range(3))
def test_every_request_on_shared_blocks_computes_again_what_failed(
    open_instance: Any, overlapping: bool, chunk: int
) -> None:
    """Requests may share blocks that a load in front of the step is still to fill."""
    engine = EngineSettings(step_tokens=400, load_mode=LoadMode.SYNC, overlapping=overlapping)
    faulty = Faulty(open_instance, engine, world_size=2)
    prompt = text(1, 3 * CHUNK + 1)
    faulty.serve(prompt)
    faulty.instance.engine.forget_prefixes()
    faulty.copiers[-1].fail_slots = {faulty.slots(prompt)[chunk]}
    longer = [[*prompt[:-1], *text(number, CHUNK)] for number in (2, 3)]
    first, *others = faulty.serve(prompt, *longer, options=NO_STORE)
    bad = frozenset(range(chunk * CHUNK // BLOCK, (chunk + 1) * CHUNK // BLOCK))
    assert first.failures == [bad]
    assert [other.hits for other in others] == [[], []], "they shared nothing"
    assert [other.failures for other in others] == [[bad], [bad]]
    faulty.instance.check_idle()


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_failed_block_among_several_groups_costs_its_request_alone(
    open_instance: Any, count: int, rank: int
) -> None:
    """Nothing unpacks a single table where a model has several (vllm#50687)."""
    groups = (
        FakeGroup(),
        FakeGroup(window=9, layers=1),
        FakeGroup(heads=1, latent=True),
        FakeGroup(fused=False),
        FakeGroup(window=30, block_tokens=8),
    )[:count]
    faulty = Faulty(open_instance, EngineSettings(prefix_cache=False), groups=groups, world_size=2)
    prompts = [text(number, 2 * CHUNK + 1) for number in range(3)]
    for prompt in prompts:
        faulty.serve(prompt)
    faulty.copiers[rank].fail_slots = {faulty.slots(prompts[1])[1]}
    requests = faulty.serve(*prompts, options=NO_STORE)
    assert faulty.instance.engine.failures == 1
    assert [request.hits for request in requests] == [[2 * CHUNK]] * 3, "a load was tried again"
    faulty.instance.check_idle()


# -- blocks that are still being read ------------------------------------------------------------


class Slow:
    """An instance whose copies wait for the gate of their copier."""

    def __init__(self, open_instance: Any) -> None:
        self.copier = SlowCopier(NumpyCopier())

        def make_copier(rank: int, backend: MemoryBackend, slot_bytes: int) -> SpanCopier:
            del rank, backend, slot_bytes
            return self.copier

        engine = EngineSettings(prefix_cache=False, step_tokens=200, reuse_at_once=True)
        self.instance: FakeInstance = open_instance(InstanceSettings(engine=engine), make_copier=make_copier)
        self.engine = self.instance.engine

    def found(self, prompt: list[int]) -> int:
        """Tokens that a new request restores; the engine compares every byte of them."""
        request = self.engine.add(prompt, options=NO_STORE)
        self.engine.run()
        self.instance.settle()
        return sum(request.hits)


def test_blocks_that_a_save_reads_are_not_free_for_another_connector(open_instance: Any) -> None:
    slow = Slow(open_instance)
    pool = slow.engine.tables.pool
    slow.copier.gate.clear()
    prompt = text(1, 2 * CHUNK + 1)
    request = slow.engine.add(prompt)
    slow.engine.step()
    assert request.complete
    (table,) = request.blocks
    slow.engine.lend(1000)
    assert pool.free == 0
    slow.engine.take_back()
    assert pool.used == len(table) > 0
    slow.copier.gate.set()
    slow.instance.settle()
    assert slow.found(prompt) == 2 * CHUNK
    slow.instance.check_idle()


@pytest.mark.parametrize("wait", [0.0, 2 * FLUSH_SECONDS], ids=["saved in time", "too late"])
def test_stored_bytes_are_the_old_ones_or_none_when_another_connector_loads_into_the_blocks(
    open_instance: Any, wait: float
) -> None:
    """What a preempted request still saves lies in blocks that somebody else's load takes, a load of
    which we bring nothing (vllm#46951)."""
    chunks = 12
    slow = Slow(open_instance)
    slow.copier.gate.clear()
    prompt = text(1, chunks * CHUNK + 1)
    request = slow.engine.add(prompt, new_tokens=3)
    slow.engine.step()
    assert slow.copier.entered.wait(10.0)
    slow.engine.preempt(request)
    slow.engine.abort(request)
    slow.engine.lend(1000)
    opener = threading.Timer(wait, slow.copier.gate.set)
    opener.start()
    slow.engine.step()  # the blocks are overwritten in it
    opener.join()
    slow.instance.settle()
    failed = slow.instance.scheduler.statistics()[0].failed_saves
    assert slow.instance.manager.stats().resident == chunks - failed
    if wait:
        assert failed > 0, "nothing was dropped"
    assert slow.found(prompt) == (chunks - failed) * CHUNK
    slow.instance.check_idle()
