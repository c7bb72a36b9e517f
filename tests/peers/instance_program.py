"""An engine as a configuration opens it, in a process of its own: ``python -m tests.peers.instance_program``.

It reads one JSON object a line from its standard input, ``{"do": name, ...}``, and answers with one line. The
engine compares every byte that it reads with what it should be; a wrong one ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import define

from kvferry.api import HostEnvironment
from kvferry.config import ConfigSources
from kvferry.runtime import prepare
from kvferry.testing.configured_engine import ConfiguredEngine, open_configured_engine
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_requests import FakeRequest

BLOCKS = 400
REST_SECONDS = 30.0


@define
class Program:
    """The names of the public methods are what can be asked for."""

    opened: ConfiguredEngine

    def serve(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Serve all prompts together."""
        began = time.monotonic()
        requests = [self.opened.engine.add(prompt) for prompt in prompts]
        self.opened.engine.run()
        return {"hits": [request.hits for request in requests], "seconds": time.monotonic() - began}

    def abort(self, prompt: list[int], seconds: float) -> dict[str, Any]:
        """Give the engine a prompt, let it step for a while, and take the prompt back."""
        engine = self.opened.engine
        request: FakeRequest = engine.add(prompt)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            engine.step()
            time.sleep(0.005)
        engine.abort(request)
        engine.run()
        return {}

    def forget(self) -> dict[str, Any]:
        """Empty the first tier, as an operator would; what is lent stays."""
        scheduler = self.opened.scheduler
        with scheduler._lock:
            scheduler._manager.clear()
        return {}

    def state(self) -> dict[str, Any]:
        """How things stand."""
        scheduler = self.opened.scheduler
        sharing = scheduler.sharing
        assert sharing is not None
        stats = scheduler.statistics()[1]
        lent = sharing.serving.leases
        return {
            "held": stats.reservations + stats.leased + stats.retiring + stats.quarantined + stats.reserved,
            "leases": stats.leases,
            "lent": lent,
            "rest": scheduler.lower_at_rest(),
            "resident": stats.resident,
            "counts": sharing.counts(),
            "peers": {peer.instance: [how.value, why] for peer, (how, why) in sharing.standings().items()},
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
        }


def main(file: str, name: str) -> None:
    """Until the standard input ends."""
    prepared = prepare(
        ConfigSources(file=Path(file), environment={}, overrides={}), HostEnvironment(variables={})
    )
    settings = EngineSettings(prefix_cache=False, blocks=BLOCKS, step_tokens=256, running=32)
    with open_configured_engine(prepared, settings, engine_id=name, environment={}) as opened:
        program = Program(opened)
        print(json.dumps({"ready": os.getpid()}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            call: Callable[..., dict[str, Any]] = getattr(program, asked.pop("do"))
            print(json.dumps(call(**asked)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
