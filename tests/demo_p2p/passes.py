"""What the P2P demo does with its engines: one computes, the other answers out of the first one's memory.

Answers are compared as :mod:`tests.demo.passes` explains: with a run in which vLLM's own prefix cache, here
that of the engine that has computed the prompt, supplied the same tokens from the same bytes. So the whole
way from its blocks into its first tier, through the channel into the other process and into the blocks there
must have left every bit as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from attrs import field, frozen

from tests.demo.passes import Step, median, warm_up
from tests.demo.prompts import CHUNK_TOKENS, Prompt, demo_prompts, random_tokens
from tests.e2e.checks import difference
from tests.engines import UNUSED, Answer, Engine, EngineError

PROMPTS = 5
GREETING = Prompt(note="greeting", tokens=random_tokens(70, 2 * CHUNK_TOKENS + 1))
"""Read once, so that two instances meet before anything is timed."""
TOLD_SECONDS = 30.0
AT_REST_SECONDS = 20.0

Clear = Callable[[], object]
"""Empties the tiers of the engine that borrows."""


@frozen(kw_only=True)
class Held:
    """A prompt that an engine has computed; ``reference`` is its answer out of vLLM's own prefix cache."""

    prompt: Prompt
    reference: Answer = field(repr=False)


@frozen(kw_only=True)
class Borrowed:
    """One prompt of the engine that reads from the other. ``hits`` are of each run: the tokens that the
    engine took from kvferry, and those of them that came from the peer."""

    prompt: Prompt
    cold_seconds: float
    peer_seconds: float
    own_seconds: float
    """Once more, out of its own first tier, where what was read has been kept."""
    limit_seconds: float
    hits: frozenset[tuple[int, int]]
    same: bool


@frozen(kw_only=True)
class Shared:
    """One way, all prompts. ``read_bytes`` in ``read_seconds`` came from the peer; the counters of both
    engines are those at the end."""

    rows: tuple[Borrowed, ...]
    read_bytes: float
    read_seconds: float
    borrower: dict[str, float]
    holder: dict[str, float]


def shared_prompts() -> tuple[Prompt, ...]:
    """Long ones, of which some share a beginning: a prompt shorter than a chunk is looked for nowhere."""
    return demo_prompts()[:PROMPTS]


def full_chunks(prompts: Sequence[Prompt]) -> int:
    """How many different keys the directory must know of them."""
    return len(
        {
            prompt.tokens[:end]
            for prompt in prompts
            for end in range(CHUNK_TOKENS, len(prompt.tokens) + 1, CHUNK_TOKENS)
        }
    )


def fill(engine: Engine, prompts: Sequence[Prompt], step: Step) -> tuple[Held, ...]:
    """Have every prompt computed and stored. What they share is computed once, and stays in vLLM's own prefix
    cache, so that it has the same bytes as what is stored."""
    held = []
    for prompt in (GREETING, *prompts):
        engine.serve(prompt.tokens)
        held.append(Held(prompt=prompt, reference=engine.serve(prompt.tokens, UNUSED)))
        step(f"computing '{prompt.note}'")
    engine.settle()
    return tuple(held[1:])


def wait_told(told: Callable[[], int], prompts: Sequence[Prompt]) -> None:
    """Until the directory knows all of it. ``told`` is how many keys it has."""
    expected = full_chunks((GREETING, *prompts))
    deadline = time.monotonic() + TOLD_SECONDS
    while told() < expected:
        if time.monotonic() > deadline:
            raise EngineError(f"the controller has {told()} keys of {expected} after {TOLD_SECONDS:g} s")


def borrow(
    engine: Engine, holder: Engine, held: Sequence[Held], repetitions: int, clear: Clear, step: Step
) -> Shared:
    """Every prompt cold, then from the peer, from the own first tier and from vLLM's own prefix cache in
    turn."""
    warm_up(engine)
    engine.serve(GREETING.tokens)
    before = engine.reset()
    rows = [_borrow(engine, each, repetitions, clear, step) for each in held]
    after = engine.settle()
    return Shared(
        rows=tuple(rows),
        read_bytes=after["borrowed_bytes"] - before["borrowed_bytes"],
        read_seconds=after["borrowed_seconds"] - before["borrowed_seconds"],
        borrower=after,
        holder=_at_rest(holder),
    )


def _borrow(engine: Engine, held: Held, repetitions: int, clear: Clear, step: Step) -> Borrowed:
    tokens = held.prompt.tokens
    engine.reset()
    cold = engine.serve(tokens, UNUSED)
    from_peer: list[Answer] = []
    own: list[Answer] = []
    limits: list[Answer] = []
    hits: set[tuple[int, int]] = set()
    for _ in range(repetitions):
        clear()
        before = engine.reset()
        from_peer.append(engine.serve(tokens))
        after = engine.reset()
        own.append(engine.serve(tokens))
        limits.append(engine.serve(tokens, UNUSED))
        gained = difference(after, before)
        hits.add((int(gained["hit_tokens"]), int(gained["borrowed_tokens"])))
    step(f"'{held.prompt.note}'")
    return Borrowed(
        prompt=held.prompt,
        cold_seconds=cold.first_token_seconds,
        peer_seconds=median(from_peer),
        own_seconds=median(own),
        limit_seconds=median(limits),
        hits=frozenset(hits),
        same=all(
            answer.same_as(held.reference) and answer.cached_tokens == held.reference.cached_tokens
            for answer in [*from_peer, *own, *limits]
        ),
    )


def _at_rest(holder: Engine) -> dict[str, float]:
    """Its counters, once it has heard that nothing is read any more."""
    deadline = time.monotonic() + AT_REST_SECONDS
    while (counters := holder.settle())["lend_leases"] and time.monotonic() < deadline:
        time.sleep(0.05)
    return counters
