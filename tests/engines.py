"""Real vLLM engines for the demo, the benches and the end-to-end tests, one process group each."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from attrs import frozen

REPOSITORY = Path(__file__).resolve().parent.parent
START_SECONDS = 300.0
CALL_SECONDS = 300.0
CLOSE_SECONDS = 30.0
OPENING_SECONDS = 60.0

NO_LOAD = {"kvferry.no_load": True}
NO_STORE = {"kvferry.no_store": True}
UNUSED = {**NO_LOAD, **NO_STORE}
"""``kv_transfer_params`` of a request in which kvferry takes no part."""

KV_TRANSFER = {
    "kv_connector": "KVFerryConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def vllm_missing() -> str | None:
    """Why no engine can be started here, or None. Imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed in this environment (make .venv/.engine installs it)"
    return None


def engine_environment(**more: str) -> dict[str, str]:
    """The variables of every engine that is compared with another.

    By itself vLLM's CPU build takes one core fewer without a connector than with one, so the cores are
    always named: all that this process may use.
    """
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")},
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "20",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }


def engine_arguments(model: Path, **more: Any) -> dict[str, Any]:
    """``vllm.LLM``'s keyword arguments that all engines here share."""
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "enforce_eager": True,
        "block_size": 128,
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        **more,
    }


def write_config(
    path: Path,
    *,
    runtime_dir: Path,
    capacity: str,
    chunk_tokens: int = 256,
    verify: bool = False,
    load: str = "async",
    plugins: Sequence[str] = (),
    lower: Mapping[str, str] | None = None,
    more: str = "",
) -> Path:
    """A kvferry.yaml with a CPU tier, and ``lower`` ones below it: their keys by name, as YAML, with the
    ``plugins`` that they need. ``more`` is YAML for its end. ``runtime_dir`` should be short: a socket lies
    below it, and a socket's path has at most 107 bytes."""
    tiers = {"cpu": f"use: cpu, capacity: {capacity}", **(lower or {})}
    path.write_text(
        f"plugins: [{', '.join(['backend_cpu', *plugins, 'connector_vllm'])}]\n"
        f"chunk_tokens: {chunk_tokens}\n"
        f"runtime_dir: {runtime_dir}\n"
        "tiers:\n"
        + "".join(f"  {name}: {{{keys}}}\n" for name, keys in tiers.items())
        + f"connector: {{load: {load}, verify: {str(verify).lower()}}}\n"
        + more
    )
    return path


@frozen(kw_only=True)
class Answer:
    """What vLLM returned for one prompt.

    ``logprobs`` holds, per generated token, (token id, log probability) of the most likely ones.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    cached_tokens: int
    first_token_seconds: float
    finish_reason: str

    def same_as(self, other: Answer) -> bool:
        """Whether tokens and all log probabilities are equal to the last bit."""
        return self.tokens == other.tokens and self.logprobs == other.logprobs


@frozen(kw_only=True)
class Trace:
    """Prompts that were served together, step by step of the engine's front end: per step, how many
    tokens each has got so far (-1 before it was added), and the time since the first was added."""

    answers: tuple[Answer, ...]
    steps: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]

    def until_first_token(self, which: int) -> tuple[tuple[int, ...], ...]:
        """The steps in which this prompt had been added and had no token yet."""
        return tuple(step for step in self.steps if step[which] == 0)


class EngineError(Exception):
    """The engine's process ended or a call failed; the message names its log."""


class Engine:
    """One ``vllm.LLM`` in a process group of its own. Use as a context manager.

    ``log`` receives everything that the engine prints.
    """

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str], log: Path) -> None:
        self._arguments = arguments
        self._environment = environment
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pending = b""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def open(self) -> None:
        """Start the engine and wait until it is ready. Raises :class:`EngineError`."""
        self.start()
        self.wait_ready()

    def start(self) -> None:
        """Start the engine's process; do not wait for it."""
        ours, theirs = socket.socketpair()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log, theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.engine_host",
                    str(theirs.fileno()),
                    json.dumps(self._arguments),
                ],
                cwd=REPOSITORY,
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket = ours

    def wait_ready(self) -> None:
        """Wait for an engine that was started. Raises :class:`EngineError` when it refuses."""
        try:
            self._receive(START_SECONDS)
        except EngineError:
            self.close()
            raise

    def close(self) -> None:
        """Stop the engine and everything that it started. Idempotent."""
        if self._socket is not None:
            self._socket.close()  # the host's loop ends at the end of its input
            self._socket = None
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSE_SECONDS)
        # Normally nobody is left; a worker that outlived its parent must not outlive us.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill(self) -> None:
        """End the engine and everything that it started as ``kill -9`` does. A call that waits for an answer
        in another thread fails then; :meth:`close` is still to be called."""
        assert self._process is not None, "the engine is not open"
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 8,
        logprobs: int | None = 5,
        parameters: Mapping[str, Any] | None = None,
        salt: str | None = None,
    ) -> list[Answer]:
        """Serve prompts together, greedily, without stopping early."""
        value = self.call(
            "generate",
            prompts=[_prompt(prompt, salt) for prompt in prompts],
            options=_options(max_tokens, logprobs, parameters),
        )
        return [_answer(answer) for answer in value["answers"]]

    def serve(
        self, prompt: Sequence[int], parameters: Mapping[str, Any] | None = None, **more: Any
    ) -> Answer:
        """Serve one prompt."""
        return self.generate([prompt], parameters=parameters, **more)[0]

    def seconds(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> float:
        """Wall time to serve the prompts together."""
        value = self.call(
            "generate",
            prompts=[_prompt(prompt, None) for prompt in prompts],
            options=_options(max_tokens, None, None),
        )
        return float(value["seconds"])

    def abort(self, prompts: Sequence[Sequence[int]], *, steps: int, max_tokens: int = 64) -> int:
        """Begin the prompts, step, abort them; how many were still running."""
        value = self.call(
            "abort",
            prompts=[_prompt(prompt, None) for prompt in prompts],
            options=_options(max_tokens, None, None),
            steps=steps,
        )
        return int(value["aborted"])

    def interrupt(
        self, prompts: Sequence[Sequence[int]], *, steps: int, max_tokens: int
    ) -> tuple[int, list[Answer]]:
        """Begin the prompts, step, have vLLM put its requests back and drop its prefix cache, go on to the
        end; how many were interrupted, and the answers."""
        value = self.call(
            "interrupt",
            prompts=[_prompt(prompt, None) for prompt in prompts],
            options=_options(max_tokens, 5, None),
            steps=steps,
        )
        return int(value["interrupted"]), [_answer(answer) for answer in value["answers"]]

    def trace(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: Sequence[int],
        after: Sequence[int] | None = None,
    ) -> Trace:
        """Serve prompts together and record who got tokens when. Each is added once the first has
        ``after`` tokens (0 unless given)."""
        value = self.call(
            "trace",
            prompts=[_prompt(prompt, None) for prompt in prompts],
            options=[_options(most, 5, None) for most in max_tokens],
            after=list(after or [0] * len(prompts)),
        )
        return Trace(
            answers=tuple(_answer(answer) for answer in value["answers"]),
            steps=tuple(tuple(step) for step in value["steps"]),
            seconds=tuple(value["seconds"]),
        )

    def reset(self) -> dict[str, float]:
        """Wait for saves, drop vLLM's own prefix cache, return kvferry's counters."""
        return dict(self.call("reset"))

    def settle(self) -> dict[str, float]:
        """Let the engine take in all results; return kvferry's counters."""
        return dict(self.call("settle"))

    def opened(self) -> dict[str, float]:
        """Counters once every rank has opened its store of the one lower tier and what is in it can be found.
        A request that comes before does not wait for that."""
        deadline = time.monotonic() + OPENING_SECONDS
        while (counters := self.settle())["lower_open"] == 0:
            if time.monotonic() > deadline:
                raise EngineError(f"the tier did not open in {OPENING_SECONDS:g} s")
        return counters

    def clear(self) -> None:
        """Drop vLLM's own prefix cache and kvferry's content."""
        if not self.call("clear")["done"]:
            raise EngineError("vLLM did not reset its prefix cache")

    def counters(self, prefix: str = "kvferry:") -> dict[str, float]:
        """Statistics up to the last step, kvferry's or those with another prefix."""
        return dict(self.call("counters", prefix=prefix))

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        """One command of :class:`tests.engine_host.Host`."""
        assert self._socket is not None, "the engine is not open"
        try:
            self._socket.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
        except OSError as error:
            raise self._failure("the engine's process ended") from error
        value: dict[str, Any] = self._receive(CALL_SECONDS)["value"]
        return value

    def _receive(self, timeout: float) -> dict[str, Any]:
        assert self._socket is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._pending:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                more = self._socket.recv(1 << 20)
            except TimeoutError as error:
                raise self._failure(f"no answer in {timeout:g} s") from error
            except OSError as error:
                raise self._failure("the engine's process ended") from error
            if not more:
                raise self._failure("the engine's process ended")
            self._pending += more
        line, _, self._pending = self._pending.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise self._failure(reply["error"])
        return reply

    def _failure(self, what: str) -> EngineError:
        return EngineError(f"{what}; the engine's log is {self.log}")


def _prompt(tokens: Sequence[int], salt: str | None) -> dict[str, Any]:
    return {"prompt_token_ids": list(tokens), **({"cache_salt": salt} if salt else {})}


def _options(max_tokens: int, logprobs: int | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "logprobs": logprobs, "kv_transfer_params": dict(parameters or {})}


def _answer(value: Mapping[str, Any]) -> Answer:
    return Answer(
        tokens=tuple(value["tokens"]),
        logprobs=tuple(
            tuple((token, logprob) for token, logprob in position) for position in value["logprobs"]
        ),
        cached_tokens=value["cached_tokens"],
        first_token_seconds=value["first_token_seconds"],
        finish_reason=value["finish_reason"],
    )
