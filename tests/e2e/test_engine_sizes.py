"""``kvferry size`` against what vLLM itself makes of the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kvferry.api import KVGeometry
from kvferry.runtime.model_shape import FAMILY_DEFAULTS, read_model
from kvferry.runtime.sizes import rank_sizes
from tests.e2e.conftest import make_model
from tests.engines import REPOSITORY, engine_environment
from tests.models import NAMES
from tests.vllm_sizes import BLOCK_TOKENS


@pytest.fixture(scope="module")
def vllm_says() -> Any:
    """What :mod:`tests.vllm_sizes` prints of all tiny models."""
    models = [str(make_model(name)) for name in NAMES]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.vllm_sizes", *models],
        cwd=REPOSITORY,
        env=engine_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_a_block_takes_what_vllm_says_on_every_number_of_ranks(vllm_says: Any, name: str) -> None:
    folder = make_model(name)
    for dtype, by_ranks in vllm_says["sizes"][str(folder)].items():
        model = read_model(folder, dtype)
        geometry = KVGeometry(groups=model.groups, chunk_tokens=BLOCK_TOKENS)
        for ranks, block_bytes in by_ranks.items():
            sizes = rank_sizes(geometry, model.attention_heads, int(ranks), BLOCK_TOKENS)
            assert sizes.block_bytes == block_bytes


def test_what_files_leave_out_is_what_transformers_takes(vllm_says: Any) -> None:
    assert len(vllm_says["defaults"]) >= 10
    for name, values in vllm_says["defaults"].items():
        assert tuple(values) == FAMILY_DEFAULTS[name], name
