"""An index elsewhere that follows the events finds what the tier itself finds."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.runtime.events import ForgetAll, RemovedChunks, StoredRun

CHUNK = 16
# Prompts that part in their first, second or fourth chunk.
PROMPTS = [[*range(stem), *range(1000 * stem + 1000, 1000 * stem + 1000 + 80)] for stem in (0, 20, 50)]


class Index:
    """What a router knows of the tier: per chunk, the chunk before it and the tokens it holds."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, tuple[bytes | None, list[int]]] = {}

    def follow(self, driven: Any) -> None:
        while events := driven.runtime.take_events():
            for event in events:
                self._apply(event)

    def _apply(self, event: object) -> None:
        if isinstance(event, StoredRun):
            parent = event.parent
            for digest, content in zip(event.digests, event.contents, strict=True):
                assert parent is None or parent in self.chunks, "stored behind a chunk that nobody knows"
                self.chunks[digest] = (parent, content.token_ids)
                parent = digest
        elif isinstance(event, RemovedChunks):
            for digest in event.digests:
                del self.chunks[digest]
        else:
            assert isinstance(event, ForgetAll)
            self.chunks.clear()

    def longest(self, prompt: list[int]) -> int:
        """Tokens of the longest chain from the start that holds this prompt's tokens."""
        found, parent = 0, None
        while True:
            wanted = prompt[found : found + CHUNK]
            ends = [key for key, held in self.chunks.items() if held == (parent, wanted)]
            assert len(ends) < 2
            if not ends:
                return found
            found, parent = found + CHUNK, ends[0]


steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "begin", "end", "end badly", "evict", "drop", "clear"]),
        st.sampled_from(PROMPTS),
        st.integers(1, 80),
    ),
    max_size=25,
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, kept=st.sampled_from([3, 10_000]))
def test_events_name_the_true_predecessor_whatever_was_there_before(
    by_hand: Any, steps: list[tuple[str, list[int], int]], kept: int
) -> None:
    """When some chunks of a prompt exist already, the others still stand behind their own predecessor
    (vllm-ascend#12002)."""
    driven = by_hand(9, events=kept)
    index = Index()
    under_way: list[Any] = []
    for number, (step, prompt, length) in enumerate(steps):
        if step in ("store", "begin"):
            driven.add(str(number), prompt[:length], load=False)
            driven.compute(str(number), 0, length)
            driven.finish(str(number))
            under_way += driven.plan().saves
        if step in ("store", "end", "end badly") and under_way:
            # The last one first, so that chunks are written before those that they stand on.
            transfer = under_way.pop()
            bad = transfer.slot_numbers()[:1] if step == "end badly" else []
            driven.report(transfer, failed=bad)
        if step == "evict":
            driven.manager.evict(length % 4)
        if step == "drop":
            driven.manager.drop(driven.digests(prompt)[length % 5 :][:1])
        if step == "clear":
            driven.runtime.clear()
        driven.manager.check()
        index.follow(driven)
        known = [index.longest(each) for each in PROMPTS]
        found = [driven.hit([*each, 1]) // CHUNK * CHUNK for each in PROMPTS]
        index.follow(driven)
        if kept > 1000:
            assert known == found
        else:
            assert all(less <= more for less, more in zip(known, found, strict=True))
    for transfer in under_way:
        driven.report(transfer)
    driven.check()
