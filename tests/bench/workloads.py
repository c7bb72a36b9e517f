"""Three kinds of traffic as sequences of prompts, each from a seed alone."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvferry.testing.replay import ReplayRequest

TENANTS = ("north", "south", "east", "west")
"""Cache salts of all requests but those of the batch job."""
BATCH = "batch"
"""The cache salt of whoever runs the polluting scan."""


class Prompt:
    """A prompt that grows chunk by chunk. Digests follow from the salt and all chunks so far."""

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self._last = hashlib.blake2b(salt.encode(), digest_size=32).digest()
        self._keys: list[bytes] = []

    def add(self, *chunks: object) -> Prompt:
        """More chunks at the end, each named by anything that has a ``repr``."""
        for chunk in chunks:
            self._last = hashlib.blake2b(self._last + repr(chunk).encode(), digest_size=32).digest()
            self._keys.append(self._last)
        return self

    def request(self) -> ReplayRequest:
        """The prompt as it is now."""
        return ReplayRequest(tuple(self._keys), self.salt)


def _popular(random_: random.Random, count: int, skew: float) -> Callable[[], int]:
    """Draws from ``count`` things, the first most often (Zipf)."""
    weights = list(itertools.accumulate(1 / (rank + 1) ** skew for rank in range(count)))
    return lambda: random_.choices(range(count), cum_weights=weights)[0]


def _chat_turns(random_: random.Random, open_at_once: int) -> Iterator[ReplayRequest]:
    """Conversations of 2 to about 20 turns over one of 8 system prompts. A conversation that was
    talked to lately is likely to go on next; each turn adds 1 to 4 chunks, and every eighth is asked
    once more as it is."""
    system = _popular(random_, 8, 1.0)
    numbers = itertools.count()
    chats: list[tuple[Prompt, int]] = []
    recent = _popular(random_, open_at_once, 0.7)
    while True:
        while len(chats) < open_at_once:
            prompt = Prompt(random_.choice(TENANTS))
            which = system()
            prompt.add(*((("system", which), part) for part in range(2 + which % 3)))
            chats.insert(0, (prompt, 2 + min(18, int(random_.expovariate(1 / 6)))))
        prompt, left = chats.pop(recent())
        number = next(numbers)
        if number % 8:
            prompt.add(*((number, part) for part in range(random_.randint(1, 4))))
        yield prompt.request()
        if left > 1:
            chats.insert(0, (prompt, left - 1))


def chats(seed: int, requests: int) -> list[ReplayRequest]:
    """Multi-turn chats, 120 open at once."""
    return list(itertools.islice(_chat_turns(random.Random(f"chats {seed}"), 120), requests))


def rag(seed: int, requests: int) -> list[ReplayRequest]:
    """Questions over shared documents: a system prompt, then 1 to 3 of 300 documents of 3 to 8 chunks,
    the popular ones often and first. Every third question is long enough for a chunk of its own, which
    nobody asks for again."""
    random_ = random.Random(f"rag {seed}")
    document = _popular(random_, 300, 1.0)
    found = []
    for number in range(requests):
        prompt = Prompt(random_.choice(TENANTS)).add("system")
        for name in sorted({document() for _ in range(random_.randint(1, 3))}):
            prompt.add(*((name, part) for part in range(3 + name % 6)))
        if number % 3 == 0:
            prompt.add(("question", number))
        found.append(prompt.request())
    return found


def scan(seed: int, requests: int) -> list[ReplayRequest]:
    """Chats, 60 open at once, while a batch job reads long texts once each: every other request, in
    bursts of 20, of 8 to 16 chunks."""
    random_ = random.Random(f"scan {seed}")
    talk = _chat_turns(random_, 60)
    numbers = itertools.count()
    found: list[ReplayRequest] = []
    while len(found) < requests:
        for _ in range(20):
            text = ("text", next(numbers))
            prompt = Prompt(BATCH).add(*((text, part) for part in range(random_.randint(8, 16))))
            found.append(prompt.request())
        found.extend(itertools.islice(talk, 20))
    return found[:requests]


WORKLOADS: Mapping[str, Callable[[int, int], Sequence[ReplayRequest]]] = {
    "chats": chats,
    "rag": rag,
    "scan": scan,
}
