"""The child process that holds one vLLM engine. Started by :class:`tests.engines.Engine`.

It reads one JSON object a line from a socket, does what it says, and answers with one line. vLLM runs
exactly as an application would run it: ``vllm.LLM`` with documented arguments, nothing replaced.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm import RequestOutput, SamplingParams

SETTLE_SECONDS = 60.0
SHUTDOWN_SECONDS = 25.0
"""vLLM's own default of five seconds is often too short on two cores; it then kills its processes."""
NUDGE = [5] * 16
"""A prompt shorter than any block: it makes the engine step and stores nothing."""


class Host:
    """Answers commands about one engine; the names of the public methods are the commands."""

    def __init__(self, llm: Any) -> None:
        # Any: a prompt is a plain dictionary here, and vLLM's union of prompt types is not.
        self._llm = llm

    def generate(self, prompts: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
        """Serve all prompts together. ``seconds`` is wall time from the first to the last."""
        began = time.perf_counter()
        outputs = self._llm.generate(list(prompts), _sampling(options), use_tqdm=False)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "answers": [_answer(output) for output in outputs]}

    def abort(
        self, prompts: Sequence[Mapping[str, Any]], options: Mapping[str, Any], steps: int
    ) -> dict[str, Any]:
        """Give the engine all prompts, let it step ``steps`` times, then abort what is left."""
        engine = self._llm.llm_engine
        names = [
            engine.add_request(f"aborted-{time.monotonic_ns()}-{index}", dict(prompt), _sampling(options))
            for index, prompt in enumerate(prompts)
        ]
        ended = sum(output.finished for _ in range(steps) for output in engine.step())
        engine.abort_request(names, internal=True)
        while engine.has_unfinished_requests():
            engine.step()
        return {"aborted": len(names) - ended}

    def interrupt(
        self, prompts: Sequence[Mapping[str, Any]], options: Mapping[str, Any], steps: int
    ) -> dict[str, Any]:
        """Give the engine all prompts, let it step ``steps`` times, have it put all requests back and drop
        its own prefix cache, then serve them to their end."""
        engine = self._llm.llm_engine
        began = time.monotonic_ns()
        names = [f"interrupted-{began}-{index}" for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, dict(prompt), _sampling(options))
        outputs = {output.request_id: output for _ in range(steps) for output in engine.step()}
        ended = sum(output.finished for output in outputs.values())
        self._llm.reset_prefix_cache(reset_running_requests=True)
        while engine.has_unfinished_requests():
            outputs.update({output.request_id: output for output in engine.step()})
        return {"interrupted": len(names) - ended, "answers": [_answer(outputs[name]) for name in names]}

    def trace(
        self,
        prompts: Sequence[Mapping[str, Any]],
        options: Sequence[Mapping[str, Any]],
        after: Sequence[int],
    ) -> dict[str, Any]:
        """Serve prompts together, each added once the first has ``after`` tokens; what each has after every
        step, and when that was."""
        engine = self._llm.llm_engine
        began = time.monotonic_ns()
        names = [f"traced-{began}-{index}" for index in range(len(prompts))]
        tokens = [-1] * len(prompts)
        outputs: dict[str, RequestOutput] = {}
        steps: list[list[int]] = []
        seconds: list[float] = []
        while engine.has_unfinished_requests() or -1 in tokens:
            for index, name in enumerate(names):
                if tokens[index] < 0 and max(0, tokens[0]) >= after[index]:
                    engine.add_request(name, dict(prompts[index]), _sampling(options[index]))
                    tokens[index] = 0
            outputs.update({output.request_id: output for output in engine.step()})
            for index, name in enumerate(names):
                if name in outputs:
                    tokens[index] = len(outputs[name].outputs[0].token_ids)
            steps.append(list(tokens))
            seconds.append((time.monotonic_ns() - began) / 1e9)
        return {"answers": [_answer(outputs[name]) for name in names], "steps": steps, "seconds": seconds}

    def settle(self) -> dict[str, float]:
        """Step until two short steps in a row show the same counters and nothing is on its way between
        tiers: all results have come in."""
        deadline = time.monotonic() + SETTLE_SECONDS
        before: dict[str, float] | None = None
        while time.monotonic() < deadline:
            self._nudge()
            counters = self.counters()
            moving = counters.get("lower_storing", 0) + counters.get("lower_fetching", 0)
            if counters == before and not moving:
                return counters
            before = counters
        raise TimeoutError(f"the engine did not come to rest in {SETTLE_SECONDS:g} s")

    def reset(self) -> dict[str, float]:
        """Drop vLLM's own prefix cache, once all saves have ended.

        vLLM refuses while blocks are in use, and a pending save holds its blocks, so its consent also
        says that nothing is being saved.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            self.settle()
            if self._llm.reset_prefix_cache():
                return self.settle()
        raise TimeoutError(f"blocks were in use for {SETTLE_SECONDS:g} s")

    def clear(self) -> dict[str, Any]:
        """Drop vLLM's own prefix cache and kvferry's."""
        self.reset()
        return {"done": self._llm.reset_prefix_cache(reset_connector=True)}

    def counters(self, prefix: str = "kvferry:") -> dict[str, float]:
        """Metrics as vLLM collected them, by name without ``prefix``, summed over their labels;
        kvferry's are absent without the connector."""
        found: dict[str, float] = {}
        for metric in REGISTRY.collect():
            if metric.name.startswith(prefix):
                for sample in metric.samples:
                    name = sample.name.removeprefix(prefix).removesuffix("_total")
                    found[name] = found.get(name, 0) + sample.value
        return {name: value for name, value in found.items() if not name.endswith("_created")}

    def _nudge(self) -> None:
        parameters = {"kvferry.no_load": True, "kvferry.no_store": True}
        self.generate([{"prompt_token_ids": NUDGE}], {"max_tokens": 2, "kv_transfer_params": parameters})


def _sampling(options: Mapping[str, Any]) -> SamplingParams:
    from vllm import SamplingParams

    parameters = options.get("kv_transfer_params")
    return SamplingParams(
        temperature=0,
        max_tokens=options["max_tokens"],
        ignore_eos=True,
        logprobs=options.get("logprobs"),
        extra_args={"kv_transfer_params": parameters} if parameters else None,
    )


def _answer(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [
            sorted((token, value.logprob) for token, value in position.items())
            for position in completion.logprobs or ()
        ],
        "cached_tokens": output.num_cached_tokens or 0,
        "first_token_seconds": getattr(output.metrics, "first_token_latency", 0.0),
        "finish_reason": completion.finish_reason,
    }


def _serve(connection: socket.socket, arguments: Mapping[str, Any]) -> None:
    from vllm import LLM

    with connection.makefile("rw", encoding="utf-8") as lines:

        def reply(value: Mapping[str, Any]) -> None:
            lines.write(json.dumps(value) + "\n")
            lines.flush()

        llm = LLM(**arguments)
        host = Host(llm)
        reply({"ready": True})
        for line in lines:
            command = json.loads(line)
            try:
                reply({"value": getattr(host, command.pop("command"))(**command)})
            except Exception as error:  # noqa: BLE001 - the parent decides what a failed command means
                reply({"error": repr(error)})
    llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_SECONDS)


def main() -> None:
    """Arguments: the descriptor of the socket and the JSON of ``vllm.LLM``'s keyword arguments."""
    _serve(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
