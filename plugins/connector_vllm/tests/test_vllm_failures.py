"""What vLLM hears of loads that failed, what it is asked about every block, and what of models that are not
cached."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm_features import FAILURES_BY_REQUEST

torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
pytest.importorskip("vllm", reason="vLLM is not installed: make test installs it")

from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvferry.runtime import StepPlan, StepReport  # noqa: E402
from kvferry_connector_vllm.engine import geometry  # noqa: E402
from kvferry_connector_vllm.scheduler_role import KVFerryMetadata, SchedulerRole  # noqa: E402
from kvferry_connector_vllm.startup import Startup  # noqa: E402
from kvferry_connector_vllm.worker_role import WorkerRole  # noqa: E402

BLOCKS = 9
PLAIN: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**PLAIN)
WINDOW = SlidingWindowSpec(**PLAIN, sliding_window=512)
STATE = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
VLLM: Any = SimpleNamespace(
    parallel_config=SimpleNamespace(rank=0), kv_events_config=None, kv_transfer_config=None
)
METADATA = KVFerryMetadata(StepPlan())
by_request = pytest.mark.vllm_has(*FAILURES_BY_REQUEST)


class Runtime:
    """Stands for either side of kvferry: a load of two blocks failed, and it keeps what it is told."""

    def __init__(self) -> None:
        self.allocations: list[tuple[str, int, Any]] = []
        self.handed_out: list[Any] = []

    def report(self, plan: StepPlan) -> StepReport:
        ended = frozenset({"good", "bad"})
        return StepReport(
            finished_receiving=ended, failed_receiving=frozenset({"bad"}), invalid_blocks=frozenset({3, 4})
        )

    def allocated(self, request_id: str, external_tokens: int, blocks: Any) -> None:
        self.allocations.append((request_id, external_tokens, blocks))

    def taken(self, blocks: Any) -> None:
        self.handed_out.append(blocks)

    def step_plan(self, running: object) -> StepPlan:
        return StepPlan()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    for name in ("open_scheduler", "open_worker", "check"):
        monkeypatch.setattr(Startup, name, lambda *_: made)
    return made


def caches(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(BLOCKS, [], groups)


def worker(*specs: KVCacheSpec) -> WorkerRole:
    role = WorkerRole(VLLM, caches(*specs))
    role.register(
        {
            f"layer.{number}": torch.zeros(BLOCKS, 2, 16, 16, dtype=torch.bfloat16)
            for number in range(len(specs))
        }
    )
    return role


def test_one_plain_group_is_told_by_the_very_blocks_and_only_once(runtime: Runtime) -> None:
    """vLLM keeps what lies before the first of them."""
    role = worker(FULL)
    results = role.transfer_results(METADATA)
    assert results.finished_recving == {"good", "bad"}
    assert results.failed_recving == set()
    assert role.take_invalid_blocks() == {3, 4}
    assert role.take_invalid_blocks() == set()


@by_request
@pytest.mark.parametrize(
    "specs",
    [(WINDOW,), (FULL, WINDOW), (FULL, WINDOW, FULL, WINDOW, WINDOW)],
    ids=["a window", "two groups", "five groups"],
)
def test_any_other_model_is_told_by_the_request_and_never_by_blocks(
    runtime: Runtime, specs: tuple[KVCacheSpec, ...]
) -> None:
    """Blocks of several groups would end the engine (vllm#50687)."""
    role = worker(*specs)
    results = role.transfer_results(METADATA)
    assert results.finished_recving == {"good", "bad"}
    assert results.failed_recving == {"bad"}
    assert role.take_invalid_blocks() == set()


def test_every_allocation_is_told_also_one_for_another_connectors_load(runtime: Runtime) -> None:
    """A save may be reading the blocks of it (vllm#46951)."""
    role = SchedulerRole(VLLM, caches(FULL))
    role.open()
    blocks = SimpleNamespace(get_block_ids=lambda: ([7, 8],))
    for tokens in (32, 0):
        role.allocated(SimpleNamespace(request_id="r"), blocks, tokens)
    assert runtime.allocations == [("r", 32, ([7, 8],)), ("r", 0, ([7, 8],))]


def test_blocks_of_requests_that_are_not_followed_are_told_too(runtime: Runtime) -> None:
    role = SchedulerRole(VLLM, caches(FULL))
    role.open()
    new = SimpleNamespace(req_id="new", num_computed_tokens=0, block_ids=([1, 2],))
    cached = SimpleNamespace(
        req_ids=["old", "older"],
        num_computed_tokens=[16, 16],
        new_block_ids=[([3],), None],
        resumed_req_ids=set(),
    )
    role.step(
        SimpleNamespace(
            scheduled_new_reqs=[new],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={"new": 20, "old": 1, "older": 1},
        )
    )
    assert [blocks for blocks in runtime.handed_out if blocks] == [([1, 2],), ([3],)]


@pytest.mark.parametrize("specs", [(STATE,), (FULL, STATE)], ids=["state", "attention and state"])
def test_a_recurrent_state_means_no_hits_one_message_and_no_change(
    specs: tuple[KVCacheSpec, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Restored attention behind a state that is not restored gives garbage (LMCache#2863, LMCache#2879)."""
    prepared = SimpleNamespace(examination=SimpleNamespace(notices=lambda: ""))
    monkeypatch.setattr(Startup, "check", lambda _: prepared)
    scheduler = SchedulerRole(VLLM, caches(*specs))
    with caplog.at_level(logging.WARNING):
        scheduler.open()
    (message,) = caplog.messages
    assert "nothing is cached and nothing changes" in message
    assert "mamba" in message
    request: Any = SimpleNamespace(request_id="r")
    assert scheduler.match(request, 0) == (0, False)
    scheduler.allocated(request, SimpleNamespace(get_block_ids=lambda: ([1],)), 0)
    output: Any = SimpleNamespace()
    assert scheduler.step(output) == KVFerryMetadata(StepPlan())
    assert scheduler.finished(request, ([1],)) is False
    role = WorkerRole(VLLM, caches(*specs))
    role.register({})
    results = role.transfer_results(METADATA)
    assert (results.finished_sending, results.finished_recving) in ((set(), set()), (None, None))
    assert role.take_invalid_blocks() == set()
    scheduler.close()
    role.close()


@pytest.mark.parametrize("spec", [FULL, WINDOW], ids=["full", "window"])
def test_every_stage_of_a_pipeline_names_a_chunk_alike(spec: KVCacheSpec) -> None:
    """The key says nothing of ranks; a stage knows its own layers only."""
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: 4, get_total_num_kv_heads=lambda: 2)
    stages = [["layer.0", "layer.1", "layer.2", "layer.3"], ["layer.0", "layer.1", "layer.2"], ["layer.3"]]
    found = {
        geometry(
            SimpleNamespace(model_config=model),
            KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec)]),
            256,
        )
        for names in stages
    }
    assert len(found) == 1
