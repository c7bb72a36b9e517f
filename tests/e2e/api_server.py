"""vLLM's OpenAI-compatible server, as an operator starts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 300.0
STOP_SECONDS = 60.0


class ApiServer:
    """Requests to a running server. ``name`` is the model's."""

    def __init__(self, port: int, name: str) -> None:
        self._base = f"http://127.0.0.1:{port}"
        self._name = name

    def complete(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        body = {
            "model": self._name,
            "prompt": list(prompt),
            "temperature": 0,
            "max_tokens": 8,
            "logprobs": 5,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        value: dict[str, Any] = json.loads(self.request("/v1/completions", json.dumps(body).encode()))
        return value

    def request(self, path: str, body: bytes | None = None) -> str:
        """GET, or POST when there is a body."""
        asked = urllib.request.Request(
            self._base + path, data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=120) as response:
            text: str = response.read().decode()
        return text

    def metrics(self) -> dict[str, float]:
        """kvferry's series at the Prometheus endpoint, without labels."""
        found = {}
        for line in self.request("/metrics").splitlines():
            if line.startswith("kvferry:"):
                name, _, value = line.rpartition(" ")
                found[name.partition("{")[0]] = float(value)
        return found


@contextlib.contextmanager
def api_server(
    model: Path, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[ApiServer]:
    """Start the server on a free port of the loopback interface, stop it as an operator would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = ApiServer(port, str(model))
    try:
        _wait_until_healthy(server, process, log)
        yield server
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(server: ApiServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}; its log is {log}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            server.request("/health")
            return
        time.sleep(0.25)
    raise TimeoutError(f"the server was not ready in {START_SECONDS:g} s; its log is {log}")
