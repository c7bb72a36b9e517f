"""A request of a fake engine and one batch of its scheduler."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from attrs import define, field

from kvferry.control.keys import KeyChain
from kvferry.data.plans import StepPlan
from kvferry.runtime.grain import GroupShape
from kvferry.runtime.requests import RequestOptions
from kvferry.testing.fake_memory import TokenHistory


class Status(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    """Blocks are allocated and an asynchronous load fills them."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@define(eq=False, kw_only=True)
class FakeRequest:
    """One request. ``tokens`` are those that the scheduler knows; ``truth`` knows all to come."""

    id: str
    truth: TokenHistory
    tokens: list[int]
    prompt_tokens: int
    total_tokens: int
    salt: str
    options: RequestOptions
    chain: KeyChain
    blocks: tuple[list[int], ...]
    status: Status = Status.WAITING
    computed: int = 0
    in_flight: int = 0
    stale: int = 0
    """Tokens in flight whose outcome counts no more."""
    expected: int = 0
    """Samples in flight."""
    preemptions: int = 0
    last_batch: int = 0
    local_tokens: int = 0
    external_tokens: int = 0
    loading_ranks: set[int] = field(factory=set)
    received: bool = False
    load_failed: bool = False
    hits: list[int] = field(factory=list)
    """Tokens that came from outside, per admission with a load."""
    failures: list[frozenset[int]] = field(factory=list)
    """Block indexes of this request that were reported as invalid, per report."""

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def complete(self) -> bool:
        """The request ran to its end, not to an abort."""
        return self.status is Status.FINISHED and len(self.tokens) == self.total_tokens

    def load_rows(self, shape: GroupShape) -> range:
        """Indexes of the blocks of a group that the load is to fill."""
        end = self.local_tokens + self.external_tokens
        first = max(self.local_tokens // shape.block_tokens, shape.first_needed(end))
        return range(first, end // shape.block_tokens)


@define(eq=False)
class ScheduledRequest:
    """Tokens ``first`` up to ``last`` of a request run in a batch."""

    request: FakeRequest
    first: int
    last: int
    samples: bool
    blocks: tuple[tuple[int, ...], ...]
    wrong: str = ""
    """Where the forward pass read wrong bytes, on any rank; empty when nowhere."""


@define(eq=False)
class Batch:
    """One step: what the scheduler hands to the workers, and what they hand back."""

    plan: StepPlan
    failures_seen: dict[int, int]
    scheduled: list[ScheduledRequest]
    synchronous: list[FakeRequest]
    """Requests whose load must be complete before the forward pass."""
    stale: set[int]
    sent: set[str] = field(factory=set)
    received: set[str] = field(factory=set)
    failed: set[str] = field(factory=set)
    invalid: set[int] = field(factory=set)
    failures: dict[int, int] = field(factory=dict)

    @property
    def empty(self) -> bool:
        return not self.scheduled


class Rounds:
    """Counts, per request, which ranks reported; the last one completes the round."""

    def __init__(self, world_size: int, what: str) -> None:
        self._world_size = world_size
        self._what = what
        self._reported: dict[str, set[int]] = {}

    def add(self, rank: int, ids: frozenset[str]) -> Iterator[str]:
        for request_id in ids:
            ranks = self._reported.setdefault(request_id, set())
            assert rank not in ranks, f"rank {rank} reported {request_id} twice as {self._what}"
            ranks.add(rank)
            if len(ranks) == self._world_size:
                del self._reported[request_id]
                yield request_id

    def open(self) -> list[str]:
        return sorted(self._reported)
