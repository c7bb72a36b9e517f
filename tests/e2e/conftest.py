"""Real engines for the tests of this folder. Every test here is marked ``engine``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import (
    KV_TRANSFER,
    REPOSITORY,
    Engine,
    engine_arguments,
    engine_environment,
    vllm_missing,
    write_config,
)

Launch = Callable[..., Engine]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = vllm_missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def small_model() -> Path:
    return make_model("small")


def make_model(name: str) -> Path:
    """Made by a process of its own: importing torch here would show all its warnings."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.models", str(REPOSITORY / ".demo"), name],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return Path(made.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def runtime_dir() -> Iterator[Path]:
    """Short, because sockets lie below it. Empty again when all its engines have stopped."""
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        path = Path(folder)
        yield path
        left = [str(each.relative_to(path)) for each in path.rglob("*") if each.is_socket() or each.is_file()]
        assert left == [], "engines that stopped in good order left files in the runtime folder"


@pytest.fixture(scope="module")
def launch(small_model: Path, runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """``launch(capacity=..., ...)`` describes an engine with the connector; open it with ``with``.

    ``config`` holds arguments of :func:`tests.engines.write_config`, ``environment`` variables,
    ``model`` another model's folder than the small Llama's; all else goes to ``vllm.LLM``.
    """

    def describe(
        *,
        config: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        transfer: dict[str, Any] | None = None,
        model: Path | None = None,
        **arguments: Any,
    ) -> Engine:
        folder = tmp_path_factory.mktemp("engine")
        file = write_config(
            folder / "kvferry.yaml",
            runtime_dir=runtime_dir,
            **{"capacity": "256MiB", "verify": True, **(config or {})},
        )
        return Engine(
            engine_arguments(
                model or small_model, **{"kv_transfer_config": transfer or KV_TRANSFER, **arguments}
            ),
            engine_environment(**{"KVFERRY_CONFIG": str(file), **(environment or {})}),
            folder / "engine.log",
        )

    return describe


@pytest.fixture(scope="session")
def cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0))
