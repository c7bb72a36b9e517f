"""The two roles between vLLM and the runtime, where releases of vLLM ask in different ways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
pytest.importorskip("vllm", reason="vLLM is not installed: make test installs it")

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402

from kvferry.runtime import StepPlan, StepReport  # noqa: E402
from kvferry_connector_vllm.scheduler_role import KVFerryMetadata, SchedulerRole  # noqa: E402
from kvferry_connector_vllm.startup import Startup  # noqa: E402
from kvferry_connector_vllm.worker_role import WorkerRole  # noqa: E402

BLOCKS = 9
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
CACHES = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], SPEC)])
VLLM: Any = SimpleNamespace(
    parallel_config=SimpleNamespace(rank=0), kv_events_config=None, kv_transfer_config=None
)


class Runtime:
    """Stands for either side of kvferry: keeps what it was told."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, ...]] = []
        self.preemptions: list[str] = []
        self.computed: list[int] = []

    def submit_saves(self, plan: StepPlan, failures_seen: int) -> None:
        self.submitted.append(plan.ended)

    def report(self, plan: StepPlan) -> StepReport:
        return StepReport(finished_sending=frozenset(name for names in self.submitted for name in names))

    def knows(self, request_id: str) -> bool:
        return False

    def add_request(self, state: object) -> None:
        return

    def preempted(self, request_id: str) -> None:
        self.preemptions.append(request_id)

    def step_plan(self, running: object) -> StepPlan:
        return StepPlan()

    def finished(self, request_id: str, blocks: object, computed: int, known_tokens: int) -> bool:
        self.computed.append(computed)
        return False


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    for name in ("open_scheduler", "open_worker", "check", "new_chain"):
        monkeypatch.setattr(Startup, name, lambda *_: made)
    return made


@pytest.fixture
def worker(runtime: Runtime) -> WorkerRole:
    role = WorkerRole(VLLM, CACHES)
    role.register({"layer": torch.zeros(BLOCKS, 2, 16, 16, dtype=torch.bfloat16)})
    return role


@pytest.fixture
def scheduler(runtime: Runtime) -> SchedulerRole:
    role = SchedulerRole(VLLM, CACHES)
    role.open()
    return role


def request(name: str, **more: Any) -> Any:
    values = {
        "request_id": name,
        "prompt_token_ids": [1, 2, 3],
        "all_token_ids": [1, 2, 3],
        "num_prompt_tokens": 3,
        "prompt_embeds": None,
        "cache_salt": None,
        "lora_request": None,
        "kv_transfer_params": None,
        "mm_features": [],
        "num_preemptions": 0,
        "num_tokens": 3,
    }
    return SimpleNamespace(**{**values, **more})


NO_TOKENS = SimpleNamespace(
    preempted_req_ids=None,
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
    num_scheduled_tokens={},
)


@pytest.mark.parametrize("asks", [False, True], ids=["vLLM does not ask", "vLLM asks"])
def test_saves_of_a_step_without_a_forward_pass_begin_whether_vllm_asks_for_them_or_not(
    worker: WorkerRole, runtime: Runtime, asks: bool
) -> None:
    """Otherwise a request that ends last would keep its blocks, and the engine would step, for ever."""
    metadata = KVFerryMetadata(StepPlan(ended=("r",), idle=True))
    if asks:
        worker.submit_saves(metadata)
    assert worker.transfer_results(metadata).finished_sending == {"r"}
    assert runtime.submitted == [("r",)]


def test_saves_of_a_step_with_a_forward_pass_wait_for_it(worker: WorkerRole, runtime: Runtime) -> None:
    """With a draft model, vLLM asks for results before the forward passes of the step have ended."""
    metadata = KVFerryMetadata(StepPlan(ended=("r",)))
    assert worker.transfer_results(metadata).finished_sending == set()
    assert runtime.submitted == []
    worker.submit_saves(metadata)
    assert worker.transfer_results(metadata).finished_sending == {"r"}
    assert runtime.submitted == [("r",)]


def test_preemptions_are_told_once_each_though_vllm_may_not_name_them(
    scheduler: SchedulerRole, runtime: Runtime
) -> None:
    first, second = request("first"), request("second", num_preemptions=2)
    scheduler.follow(first)
    scheduler.follow(second)
    scheduler.step(NO_TOKENS)
    assert runtime.preemptions == []
    first.num_preemptions += 1
    scheduler.step(NO_TOKENS)
    scheduler.step(NO_TOKENS)
    assert runtime.preemptions == ["first"]
    first.num_preemptions += 1
    second.num_preemptions += 1
    scheduler.finished(request("second", num_computed_tokens=0, num_output_placeholders=0), ([],))
    scheduler.step(NO_TOKENS)
    assert runtime.preemptions == ["first", "first"]


@pytest.mark.parametrize(
    ("counts", "computed"),
    [
        ({"num_output_placeholders": 2}, 98),
        ({"num_output_placeholders": 2, "num_in_flight_tokens": 30}, 70),
        ({"num_output_placeholders": 0}, 100),
    ],
    ids=["what is to be sampled", "everything", "nothing"],
)
def test_tokens_in_flight_are_not_taken_as_computed_when_a_request_ends(
    scheduler: SchedulerRole, runtime: Runtime, counts: dict[str, int], computed: int
) -> None:
    scheduler.finished(request("r", num_computed_tokens=100, **counts), ([1],))
    assert runtime.computed == [computed]
