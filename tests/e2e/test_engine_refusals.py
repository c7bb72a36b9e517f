"""An engine whose configuration cannot work does not start, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Launch
from tests.engines import KV_TRANSFER, EngineError

FAULTY = """\
plugins: [backend_cpu, connector_vllm]
chunk_tokens: 256
tiers:
  cpu: {use: cpu, capacity: 64MiB, evict: lru}
"""


def test_fault_in_the_file(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "faulty.yaml"
    file.write_text(FAULTY)
    engine = launch(environment={"KVFERRY_CONFIG": str(file)})
    with pytest.raises(EngineError), engine:
        pass
    log = engine.log.read_text()
    assert f"{file}:4:" in log
    assert "unknown key" in log
    assert "did you mean 'eviction'?" in log


def test_broken_rule(launch: Launch) -> None:
    engine = launch(transfer={**KV_TRANSFER, "kv_load_failure_policy": "fail"})
    with pytest.raises(EngineError), engine:
        pass
    log = engine.log.read_text()
    assert "error[VLLM001]" in log
    assert '"kv_load_failure_policy": "recompute"' in log
