"""The demo's prompts: random bytes, so that no two begin alike unless they are meant to."""

from __future__ import annotations

import random

from attrs import frozen

from tests.models import BYTE_TOKENS, FIRST_TOKEN

CHUNK_TOKENS = 256
BLOCK_TOKENS = 128


@frozen(kw_only=True)
class Prompt:
    """``shared`` tokens at the start are those of an earlier prompt."""

    note: str
    tokens: tuple[int, ...]
    shared: int = 0

    @property
    def whole_blocks(self) -> int:
        """Tokens that a cache can hold of it, with one token at least left to compute."""
        return (len(self.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def random_tokens(seed: int, count: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(FIRST_TOKEN, FIRST_TOKEN + BYTE_TOKENS) for _ in range(count))


def demo_prompts() -> tuple[Prompt, ...]:
    """Nine prompts; those that share a beginning come after the one they share it with."""
    system = random_tokens(1, 2500)
    within_chunk = 13 * BLOCK_TOKENS  # ends within a chunk
    at_chunk = 4 * CHUNK_TOKENS
    return (
        Prompt(note="long", tokens=random_tokens(2, 4000)),
        Prompt(note="family, first", tokens=system),
        Prompt(
            note=f"family, shares {within_chunk:,}",
            tokens=system[:within_chunk] + random_tokens(3, 3300 - within_chunk),
            shared=within_chunk,
        ),
        Prompt(
            note=f"family, shares {at_chunk:,}",
            tokens=system[:at_chunk] + random_tokens(4, 1900 - at_chunk),
            shared=at_chunk,
        ),
        Prompt(note="10 chunks exactly", tokens=random_tokens(5, 10 * CHUNK_TOKENS)),
        Prompt(note="17 blocks exactly", tokens=random_tokens(6, 17 * BLOCK_TOKENS)),
        Prompt(note="no round number", tokens=random_tokens(8, 1337)),
        Prompt(note="no round number", tokens=random_tokens(9, 1000)),
        Prompt(note="less than a chunk", tokens=random_tokens(10, 200)),
    )
