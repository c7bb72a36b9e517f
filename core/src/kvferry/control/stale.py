"""What was cleared in a tier whose store may still hold it."""

from __future__ import annotations

from kvferry.control.outcomes import ChunkFacts

CLEARS_KEPT = 1000
"""Clears that are told apart; of more, everything counts as cleared."""


class Stale:
    """Chunks from before a clear, by salt and model (``None`` for any). Until a store has deleted them they
    could be found at an opening, and never may be."""

    def __init__(self) -> None:
        self._cleared: set[tuple[str | None, str | None]] = set()

    def __bool__(self) -> bool:
        return bool(self._cleared)

    def covers(self, facts: ChunkFacts) -> bool:
        """Whether the chunk, which a store was found to hold, may be from before a clear."""
        salts, models = (facts.salt, None), (facts.model, None)
        return any((salt, model) in self._cleared for salt in salts for model in models)

    def add(self, salt: str | None, model: str | None) -> None:
        """Chunks of this salt and this model were cleared."""
        if len(self._cleared) >= CLEARS_KEPT:
            self._cleared = {(None, None)}
        self._cleared.add((salt, model))

    def clear(self) -> None:
        """The store has deleted all of them."""
        self._cleared.clear()
