"""What the demo does with an engine, and how it knows that an answer is the same.

In bfloat16 a prompt that is computed as a whole and one of which only the end is computed differ in
the last bits, with vLLM's own prefix cache as well. So a run with kvferry is compared with a run in
which *vLLM's own prefix cache* supplied the same number of tokens, with the same bytes: then the same
numbers go through the same operations in the same order, and tokens and log probabilities must be
equal to the last bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from attrs import field, frozen

from tests.demo.prompts import Prompt
from tests.engines import NO_LOAD, NO_STORE, UNUSED, Answer, Engine

Step = Callable[[str], None]
"""Called with a word about what was just done."""


@frozen(kw_only=True)
class Served:
    """One prompt of the first two passes."""

    prompt: Prompt
    cold_seconds: float
    kvferry_seconds: float
    limit_seconds: float
    hit_tokens: int
    """kvferry's own count, of one run."""
    cached_tokens: int
    """vLLM's count, of the same run."""
    limit_tokens: int
    """What vLLM's own prefix cache supplied in the run that is compared with."""
    same: bool
    cold: Answer = field(repr=False)
    reference: Answer = field(repr=False)
    """With what vLLM's own prefix cache supplied."""


@frozen(kw_only=True)
class ServedSmall:
    """One prompt of the pass in which the tier is too small."""

    prompt: Prompt
    cached_tokens: int
    limit_tokens: int
    same: bool


@frozen(kw_only=True)
class Pass:
    """Rows of one engine and kvferry's counters at its end."""

    rows: tuple[Served, ...]
    counters: dict[str, float]


def large_tier(engine: Engine, prompts: Iterable[Prompt], repetitions: int, step: Step) -> Pass:
    """Every prompt cold, then with kvferry and with vLLM's own prefix cache in turn."""
    warm_up(engine)
    rows = [_serve(engine, prompt, repetitions, step) for prompt in prompts]
    return Pass(rows=tuple(rows), counters=engine.reset())


def _serve(engine: Engine, prompt: Prompt, repetitions: int, step: Step) -> Served:
    engine.reset()
    if prompt.shared:
        # Stored bytes of the shared beginning come from the earlier prompt, whose computation had
        # another shape. A cold run would leave its own version of them in vLLM's prefix cache, so it
        # only shows the time; the run after it takes the beginning from kvferry and stores the rest.
        cold = engine.serve(prompt.tokens, UNUSED)
        engine.reset()
        engine.serve(prompt.tokens)
    else:
        cold = engine.serve(prompt.tokens, NO_LOAD)
    step("cold")
    # From here on vLLM's prefix cache and kvferry's tier hold the same bytes of this prompt: every
    # block was either computed once and stored, or restored.
    reference = engine.serve(prompt.tokens, UNUSED)
    limits = [reference]
    ours: list[Answer] = []
    hits: list[float] = []
    for _ in range(repetitions):
        before = engine.reset()
        ours.append(engine.serve(prompt.tokens))
        limits.append(engine.serve(prompt.tokens, UNUSED))
        hits.append(engine.reset()["hit_tokens"] - before["hit_tokens"])
    step("again")
    counts = {answer.cached_tokens for answer in [*ours, *limits]}
    return Served(
        prompt=prompt,
        cold_seconds=cold.first_token_seconds,
        kvferry_seconds=median(ours),
        limit_seconds=median(limits[1:]),
        hit_tokens=int(hits[0]),
        cached_tokens=ours[0].cached_tokens,
        limit_tokens=reference.cached_tokens,
        same=all(answer.same_as(reference) for answer in [*ours, *limits])
        and len(counts) == 1
        and set(hits) == {reference.cached_tokens},
        cold=cold,
        reference=reference,
    )


def small_tier(
    engine: Engine, prompts: Sequence[Prompt], step: Step
) -> tuple[tuple[ServedSmall, ...], dict[str, float]]:
    """Every prompt cold into a tier that cannot hold them all, then again, the last one first."""
    warm_up(engine)
    cold: list[Answer] = []
    for prompt in prompts:
        engine.reset()
        cold.append(engine.serve(prompt.tokens, NO_LOAD))
        step("cold")
    rows = []
    for prompt, computed in reversed(list(zip(prompts, cold, strict=True))):
        rows.append(serve_partly(engine, prompt, computed))
        step("again")
    return tuple(reversed(rows)), engine.reset()


def serve_partly(engine: Engine, prompt: Prompt, computed: Answer | None = None) -> ServedSmall:
    """Serve a prompt of which some of the beginning may be left. ``computed`` is its answer from a cold
    run, which is made here otherwise, if it is needed."""
    engine.reset()
    ours = engine.serve(prompt.tokens)
    hit = ours.cached_tokens
    if hit == 0:
        if computed is None:
            engine.reset()
            computed = engine.serve(prompt.tokens, UNUSED)
        # The whole prompt was computed in one step from nothing, as in the cold run.
        return ServedSmall(prompt=prompt, cached_tokens=0, limit_tokens=0, same=ours.same_as(computed))
    # Only a part of the prompt may have been left. To make vLLM's own prefix cache supply exactly that
    # part with exactly those bytes, let it hold nothing else: a prompt that ends one token later
    # fetches the same chunks once more. That restored bytes are those that were stored is compared
    # block by block inside the engine (connector.verify), in this pass for every single load.
    engine.reset()
    primed = engine.serve(prompt.tokens[: hit + 1], NO_STORE, max_tokens=1)
    reference = engine.serve(prompt.tokens, UNUSED)
    return ServedSmall(
        prompt=prompt,
        cached_tokens=hit,
        limit_tokens=reference.cached_tokens,
        same=ours.same_as(reference) and primed.cached_tokens == reference.cached_tokens == hit,
    )


def warm_up(engine: Engine) -> None:
    """First steps of an engine prepare its kernels; nobody should pay for them in a figure."""
    for length in (300, 4000):
        engine.serve([5] * length, UNUSED)
        engine.serve([5] * length, UNUSED)


def median(answers: Iterable[Answer]) -> float:
    """Seconds to the first token."""
    return statistics.median(answer.first_token_seconds for answer in answers)
