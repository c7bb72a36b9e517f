"""What the SSD demo does with its engines, one after the other on the same folder.

Answers are compared as :mod:`tests.demo.passes` explains: with a run in which vLLM's own prefix cache
supplied the same tokens from the same bytes. For what was stored by the first engine that run is the first
engine's own, before it was stopped: so the whole way from its memory to the disk, through the restart and
into another engine's memory must have left every bit as it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attrs import frozen

from tests.demo.passes import Served, ServedSmall, Step, median, serve_partly, warm_up
from tests.demo.prompts import CHUNK_TOKENS, Prompt, random_tokens
from tests.engines import UNUSED, Answer, Engine, EngineError

FIRST_WRITE_SECONDS = 120.0
LET_IT_WRITE_SECONDS = 0.06
"""From the first write of a store to the kill at the least: long enough that some chunks may be whole."""


@frozen(kw_only=True)
class Risen:
    """One prompt of the engine that was started again."""

    prompt: Prompt
    ssd_seconds: float
    cpu_seconds: float
    limit_seconds: float
    cached_tokens: int
    """vLLM's count of what came from the SSD."""
    whole_from_ssd: bool
    """Whether each of these hits brought up exactly the chunks it needed, and those from memory none."""
    same: bool


@frozen(kw_only=True)
class Restarted:
    """What the engine did that was started again. ``adopted`` chunks it found in the folder."""

    rows: tuple[Risen, ...]
    adopted: int
    counters: dict[str, float]


@frozen(kw_only=True)
class AfterKill:
    """What was there after ``kill -9`` during stores.

    ``interrupted`` are the prompts that were being stored, ``unharmed`` whether those of before have
    their answers. ``durable`` chunks of the interrupted ones had been acknowledged or were just complete;
    they have ``chunks`` in all.
    """

    rows: tuple[ServedSmall, ...]
    interrupted: tuple[ServedSmall, ...]
    durable: int
    chunks: int
    counters: dict[str, float]


def after_restart(
    engine: Engine,
    filled: Sequence[Served],
    repetitions: int,
    clear_memory: Callable[[], None],
    step: Step,
) -> Restarted:
    """Every prompt from the SSD, from the CPU tier and from vLLM's own prefix cache in turn.

    ``clear_memory`` empties the CPU tier, and it alone.
    """
    warm_up(engine)
    adopted = int(engine.opened()["lower_adopted"])
    rows = [_rise(engine, row, repetitions, clear_memory, step) for row in filled]
    return Restarted(rows=tuple(rows), adopted=adopted, counters=engine.reset())


def _rise(
    engine: Engine, stored: Served, repetitions: int, clear_memory: Callable[[], None], step: Step
) -> Risen:
    tokens = stored.prompt.tokens
    needed = math.ceil(stored.reference.cached_tokens / CHUNK_TOKENS)
    from_ssd: list[Answer] = []
    from_cpu: list[Answer] = []
    limits: list[Answer] = []
    fetched: list[tuple[float, float]] = []
    for _ in range(repetitions):
        clear_memory()
        before = engine.reset()["lower_fetched"]
        from_ssd.append(engine.serve(tokens))
        between = engine.reset()["lower_fetched"]
        from_cpu.append(engine.serve(tokens))
        limits.append(engine.serve(tokens, UNUSED))
        fetched.append((between - before, engine.settle()["lower_fetched"] - between))
    step("again")
    return Risen(
        prompt=stored.prompt,
        ssd_seconds=median(from_ssd),
        cpu_seconds=median(from_cpu),
        limit_seconds=median(limits),
        cached_tokens=from_ssd[0].cached_tokens,
        whole_from_ssd=set(fetched) == {(needed, 0)},
        same=all(
            answer.same_as(stored.reference) and answer.cached_tokens == stored.reference.cached_tokens
            for answer in [*from_ssd, *from_cpu, *limits]
        ),
    )


def interrupted_prompts() -> tuple[Prompt, ...]:
    """Prompts that are being stored when the engine is killed."""
    return tuple(Prompt(note="killed while stored", tokens=random_tokens(50 + i, 3000)) for i in range(4))


def kill_during_stores(engine: Engine, prompts: Sequence[Prompt], folder: Path) -> None:
    """Have the prompts computed and stored, and kill the whole engine at the moment of a write."""
    engine.settle()
    written = _last_write(folder)
    first = math.inf
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(engine.generate, [prompt.tokens for prompt in prompts], max_tokens=64)
        deadline = time.monotonic() + FIRST_WRITE_SECONDS
        while not answers.done() and time.monotonic() < min(deadline, first + LET_IT_WRITE_SECONDS):
            time.sleep(0.001)
            if _last_write(folder) != written:
                first = min(first, time.monotonic())
        written = _last_write(folder)
        while _last_write(folder) == written and not answers.done() and time.monotonic() < deadline:
            time.sleep(0.001)
        in_time = _last_write(folder) != written
        engine.kill()
        failure = answers.exception()
    if not in_time or not isinstance(failure, EngineError):
        raise EngineError(f"the engine was to be killed during its stores, but they had ended: {failure!r}")


def _last_write(folder: Path) -> int:
    return max((file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()), default=0)


def after_kill(
    engine: Engine,
    filled: Sequence[Served],
    interrupted: Sequence[Prompt],
    adopted_before: int,
    step: Step,
) -> AfterKill:
    """Serve all prompts once more, with the digests of every restored block compared."""
    warm_up(engine)
    durable = int(engine.opened()["lower_adopted"]) - adopted_before
    rows = []
    for row in filled:
        engine.reset()
        ours = engine.serve(row.prompt.tokens)
        rows.append(
            ServedSmall(
                prompt=row.prompt,
                cached_tokens=ours.cached_tokens,
                limit_tokens=row.reference.cached_tokens,
                same=ours.same_as(row.reference),
            )
        )
        step("again")
    broken = []
    for prompt in interrupted:
        broken.append(serve_partly(engine, prompt))
        step("again")
    return AfterKill(
        rows=tuple(rows),
        interrupted=tuple(broken),
        durable=durable,
        chunks=sum(math.ceil(prompt.whole_blocks / CHUNK_TOKENS) for prompt in interrupted),
        counters=engine.reset(),
    )
