"""Quotas from a configuration file to a running engine, and what its operator makes of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from kvferry.api import HostEnvironment
from kvferry.cli.host import Host
from kvferry.cli.main import main
from kvferry.runtime import (
    ConfigSources,
    SchedulerRuntime,
    prepare,
)
from kvferry.testing.configured_engine import open_configured_engine
from kvferry.testing.fake_engine import EngineSettings, FakeEngine
from kvferry.testing.fake_instance import wait_until

CHUNK = 16
CHUNK_BYTES = 512
"""Of the fake engine's cache; quotas below are whole chunks of it, and half a chunk more."""
CONFIG = """
plugins: [backend_cpu, eviction_policies]
instance: tenants
chunk_tokens: 16
runtime_dir: {folder}
tiers:
  cpu:
    use: cpu
    capacity: 16KiB
    eviction: {{use: isolated_lru, default: 2KiB, quotas: {{small: 1280B, big: 6KiB}}}}
"""
SMALL, BIG, DEFAULT = 2, 12, 4
"""Chunks that these owners may hold."""


@define
class Tenants:
    """An engine whose requests have salts."""

    engine: FakeEngine
    scheduler: SchedulerRuntime

    def serve(self, salt: str, start: int, chunks: int = 3) -> int:
        """Tokens that were found of a prompt of so many chunks and one token."""
        request = self.engine.add(list(range(start, start + chunks * CHUNK + 1)), salt=salt)
        self.engine.run()

        def saved() -> bool:
            self.engine.step()
            return self.scheduler.statistics()[1].reservations == 0

        wait_until(saved, 10.0, "saves without a result")
        return sum(request.hits)


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kf") as name:
        yield Path(name)


@pytest.fixture
def tenants(folder: Path) -> Iterator[Tenants]:
    file = folder / "kvferry.yaml"
    file.write_text(CONFIG.format(folder=folder))
    sources = ConfigSources(file=file, environment={}, overrides={})
    prepared = prepare(sources, HostEnvironment(variables={}))
    settings = EngineSettings(prefix_cache=False, step_tokens=200)
    with open_configured_engine(prepared, settings, engine_id="tenants", environment={}) as opened:
        assert opened.description.bytes_of(CHUNK) == CHUNK_BYTES
        wait_until(
            lambda: opened.scheduler.statistics()[1].capacity == 32, 10.0, "slots that never became ready"
        )
        yield Tenants(opened.engine, opened.scheduler)


@pytest.fixture
def quota(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs ``kvferry live quota``; what it printed, or its code and what it complained of."""

    def run(*words: str) -> Any:
        host = Host(environment={"XDG_RUNTIME_DIR": str(folder)})
        code = main(["live", "quota", *words, "--format", "json"], host)
        out, err = capsys.readouterr()
        return (code, err) if code else json.loads(out)

    return run


def held(answer: Any) -> dict[str, int]:
    return {row["owner"]: row["held"] for row in answer["owners"]}


def test_a_tenant_keeps_what_it_has_whatever_the_others_store(
    tenants: Tenants, quota: Callable[..., Any]
) -> None:
    assert tenants.serve("big", 0) == 0
    assert tenants.serve("small", 0) == 0
    for round_ in range(1, 12):
        tenants.serve("small", 1000 * round_)
        tenants.serve("stranger", 1000 * round_, 6)
        answer = quota("list")
        assert held(answer)["small"] <= SMALL * CHUNK_BYTES
        assert held(answer)["big"] == 3 * CHUNK_BYTES
        assert answer["others_held"] <= DEFAULT * CHUNK_BYTES
    assert tenants.serve("big", 0) == 3 * CHUNK
    assert tenants.scheduler.statistics()[1].over_quota > 0
    for number in range(2, 9):
        tenants.serve("big", 1000 * number, 4)
        assert held(quota("list"))["big"] <= BIG * CHUNK_BYTES


def test_an_operator_changes_quotas_of_a_running_engine(tenants: Tenants, quota: Callable[..., Any]) -> None:
    for number in range(4):
        tenants.serve("big", 1000 * number)
    answer = quota("list")
    assert answer["default"] == 2048
    assert held(answer) == {"big": BIG * CHUNK_BYTES, "small": 0}
    lowered = quota("set", "big", "2KiB")
    assert held(lowered)["big"] == 4 * CHUNK_BYTES
    assert lowered["evicted"] == BIG - 4
    tenants.serve("big", 9000, 8)
    assert held(quota("list"))["big"] <= 4 * CHUNK_BYTES
    assert list(held(quota("forget", "big"))) == ["small"]
    code, complaint = quota("forget", "big")
    assert code == 2
    assert "'big'" in complaint
    quota("set", "--default", "1KiB")
    assert quota("list")["others_held"] == 2 * CHUNK_BYTES
    quota("set", "small", "unlimited")
    tenants.serve("small", 0, 10)
    assert held(quota("list"))["small"] == 10 * CHUNK_BYTES


def test_statistics_name_no_owner_without_a_quota_of_its_own(
    tenants: Tenants, quota: Callable[..., Any]
) -> None:
    for number in range(40):
        tenants.serve(f"user-{number}", 0, 1)
        tenants.serve(f"user-{number}", 5000, 6)
    answer = quota("list")
    assert list(held(answer)) == ["big", "small"]
    assert answer["others_over_quota"] == tenants.scheduler.statistics()[1].over_quota
    assert answer["others_over_quota"] > 0
    assert "user-" not in json.dumps(answer)
