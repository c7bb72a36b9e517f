"""Transfer engines of other projects, each between two processes of its own, beside a channel's bench."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from attrs import field, frozen

from tests.bench.environments import PackageMissing, kept_environment

PROGRAM = Path(__file__).with_name("transfer_program.py")
END_SECONDS = 20.0


@frozen(kw_only=True)
class TransferEngine:
    """Which of them, how it is installed, and the variables it runs with. ``installs`` are without the
    packages' own lists: those want CUDA."""

    name: str
    installs: tuple[tuple[str, ...], ...]
    check: str
    variables: Mapping[str, str] = field(factory=dict)


NIXL = TransferEngine(
    name="nixl",
    installs=(("--no-deps", "nixl==1.5.1", "nixl-cu12==1.5.1"),),
    check="import nixl._api, os; os._exit(0)",
    # Without this, libraries of the ib module crash when a process ends. There is no such hardware here.
    variables={"UCX_MODULES": "^ib", "NIXL_LOG_LEVEL": "ERROR"},
)
"""Its UCX backend as it chooses by itself: bytes are copied by the kernel from the other process's memory."""

NIXL_TCP = TransferEngine(
    name="nixl",
    installs=NIXL.installs,
    check=NIXL.check,
    variables={**NIXL.variables, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
)

MOONCAKE = TransferEngine(
    name="mooncake",
    installs=(("--no-deps", "mooncake-transfer-engine-non-cuda==0.3.13.post1"),),
    check="import mooncake.engine, os; os._exit(0)",
    variables={"MC_TCP_BIND_ADDRESS": "127.0.0.1"},
)
"""Its TCP transport. The library listens at all addresses of the machine for the seconds of its run,
whatever it is told."""


class Moving:
    """Two processes of an engine; one moves all spans when it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def move(self, verb: str) -> float:
        """Seconds for all spans. Raises ``RuntimeError`` when the engine fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(verb + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the other engine ended during a {verb}")
        return float(answer)


@contextmanager
def moving(engine: TransferEngine, cache: Path, total: int, span: int) -> Iterator[Moving]:
    """An engine between two processes, installed below ``cache`` if it is not yet. Raises
    :class:`PackageMissing` when it cannot be installed or does not start."""
    python = kept_environment(cache, engine.name, engine.installs, engine.check)
    command = [str(python), str(PROGRAM), engine.name, str(total), str(span)]
    with ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        _, told = _started(stack, engine, command, errors)
        process, ready = _started(stack, engine, [*command, told.strip()], errors)
        if ready.strip() != "ready":
            errors.seek(0)
            last = (errors.read().strip() or "no reason given").splitlines()[-1]
            raise PackageMissing(f"{engine.name} does not start: {last}")
        yield Moving(process)


def _started(
    stack: ExitStack, engine: TransferEngine, command: list[str], errors: IO[str]
) -> tuple[subprocess.Popen[str], str]:
    """A process that ends with the stack, and its first line."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **engine.variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    stack.callback(_end, process)
    assert process.stdout is not None
    return process, process.stdout.readline()


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
