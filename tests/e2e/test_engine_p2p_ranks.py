"""Two real vLLM of two ranks each: a rank reads from the same rank of the other."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.controllers import running_controller
from tests.demo.prompts import random_tokens
from tests.demo_p2p.modes import DELAYED, Way
from tests.e2e.checks import live, whole_blocks
from tests.e2e.conftest import Launch
from tests.e2e.peers import CHUNK, open_pair, served_by_the_other


def test_two_ranks_answer_from_the_memory_of_two(launch: Launch, cores: list[int], runtime_dir: Path) -> None:
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    with running_controller() as url, ExitStack() as stack:
        pair = open_pair(
            stack,
            launch,
            Way(mode=DELAYED, channel="local"),
            url,
            tensor_parallel_size=2,
            environment={"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}"},
            max_num_batched_tokens=4096,
            max_model_len=4096,
        )
        prompt = random_tokens(11, 5 * CHUNK + 140)
        borrowed, lent = served_by_the_other(url, pair.near, pair.far, prompt)
        tokens = whole_blocks(len(prompt))
        assert borrowed["borrowed_tokens"] == tokens
        # Both ranks: a slot is one rank's.
        slot = live(runtime_dir, "status", pair.near.name)["slot_bytes"]
        assert borrowed["borrowed_bytes"] >= 2 * (tokens * slot // CHUNK)
        assert (lent["lend_granted"], lent["lend_done"]) == (1, 1)
