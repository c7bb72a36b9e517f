"""Two engines as a configuration opens them, and a controller as its command starts it: one answers from the
memory of the other."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.api import HostEnvironment
from kvferry.config import ConfigSources
from kvferry.runtime import prepare
from kvferry.testing.configured_engine import ConfiguredEngine, open_configured_engine
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import wait_until
from tests.controllers import running_controller

CHUNK = 16
CONFIG = """\
plugins: [backend_cpu, transport_{channel}, sharing_p2p]
instance: {name}
chunk_tokens: 16
runtime_dir: {folder}
tiers: {{cpu: {{use: cpu, capacity: 1MiB}}}}
channel: {{use: {channel}}}
lookup: {{use: controller, url: "{url}"}}
p2p: {{use: p2p}}
"""
STAGED = CONFIG.replace("sharing_p2p]", "sharing_p2p, host_staging]")
STAGED += "staging: {{use: host, capacity: 64KiB}}\n"
DELAYED = STAGED.replace("use: p2p}", "use: p2p, delay: true, land_on: device, buffer: 64KiB}")


def open_engine(
    stack: ExitStack, folder: Path, name: str, channel: str, url: str, config: str = CONFIG
) -> ConfiguredEngine:
    file = folder / f"{name}.yaml"
    file.write_text(config.format(channel=channel, name=name, folder=folder, url=url))
    prepared = prepare(ConfigSources(file=file, environment={}, overrides={}), HostEnvironment(variables={}))
    # Without a prefix cache of its own, so that everything is restored from the tier.
    return stack.enter_context(
        open_configured_engine(prepared, EngineSettings(prefix_cache=False), engine_id=name, environment={})
    )


def serve(engine: ConfiguredEngine, tokens: list[int]) -> list[int]:
    request = engine.engine.add(tokens)
    engine.engine.run()
    wait_until(engine.scheduler.lower_at_rest, 20.0, "something that never came to rest")
    return request.hits


@pytest.mark.parametrize("channel", ["tcp", "local"])
def test_an_engine_answers_from_the_memory_of_another(channel: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvf") as name, running_controller() as url, ExitStack() as stack:
        near = open_engine(stack, Path(name), "near", channel, url)
        far = open_engine(stack, Path(name), "far", channel, url)
        tokens = [7 * number for number in range(4 * CHUNK + 1)]
        assert serve(far, tokens) == []
        assert found_at_a_peer(near, tokens) == [4 * CHUNK]


def found_at_a_peer(near: ConfiguredEngine, tokens: list[int]) -> list[int]:
    """What it hits once it hits anything."""
    hits: list[int] = []

    def found() -> bool:
        # What was computed is told in batches: the directory may not have it yet.
        near.scheduler._manager.clear()
        hits[:] = serve(near, tokens)
        return bool(hits)

    wait_until(found, 20.0, "a hit at a peer")
    return hits


@pytest.mark.parametrize(
    ("channel", "config"), [("tcp", STAGED), ("local", DELAYED)], ids=["tcp, eager", "local, delayed"]
)
def test_an_engine_answers_from_the_staging_of_another(channel: str, config: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvf") as name, running_controller() as url, ExitStack() as stack:
        near = open_engine(stack, Path(name), "near", channel, url, config)
        far = open_engine(stack, Path(name), "far", channel, url, STAGED)
        assert far.scheduler.sharing is not None
        serving = far.scheduler.sharing.serving
        for turn in range(3):  # slots of the staging are used again
            tokens = [7 * number + turn for number in range(4 * CHUNK + 1)]
            assert serve(far, tokens) == []
            assert found_at_a_peer(near, tokens) == [4 * CHUNK]
            wait_until(lambda: serving.leases == 0, 20.0, "a lease that nobody gave back")
        assert serving.counts["staged"] == 12
        serving.check()
