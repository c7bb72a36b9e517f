"""``kvferry controller`` as a process, for tests and demos."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

END_SECONDS = 20.0


@contextmanager
def running_controller() -> Iterator[str]:
    """Start one on a free port of loopback, and end it; its URL."""
    command = [sys.executable, "-m", "kvferry.cli.main", "controller", "--http", "off"]
    with subprocess.Popen(
        [*command, "--listen", "tcp://127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if "ready at" not in line:
                raise RuntimeError(f"the controller did not start: {line!r}")
            yield line.split("ready at ")[1].split(",")[0]
        finally:
            process.terminate()
            process.wait(END_SECONDS)


def keys_told(url: str) -> dict[str, int]:
    """How many keys the directory there has of each instance."""
    return {
        each["instance"]: each["keys"] for each in json.loads(controller_status(url, "--json"))["instances"]
    }


def controller_status(url: str, *words: str) -> str:
    """What ``kvferry controller status`` prints of the one there."""
    command = [sys.executable, "-m", "kvferry.cli.main", "controller", "status", "--url", url, *words]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=END_SECONDS)
    return told.stdout.strip()
