"""Every path of facts that is known, with its type and meaning, in one place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from attrs import frozen

from kvferry.api import FactSource, FactSpec
from kvferry.compat.views import INSTANCES, PAIR_WORDS, plain_path, stands_for


@frozen(kw_only=True)
class OwnedFactSpec:
    """What a fact means, and the plugin that says so."""

    spec: FactSpec
    owner: str


class FactCatalogue:
    """Look-up by path. Immutable; where two plugins describe one path, the first counts."""

    def __init__(self, entries: Iterable[OwnedFactSpec]) -> None:
        self._entries: dict[str, OwnedFactSpec] = {}
        for entry in entries:
            self._entries.setdefault(entry.spec.path, entry)

    @property
    def entries(self) -> tuple[OwnedFactSpec, ...]:
        """All, in the order in which they were given."""
        return tuple(self._entries.values())

    def find(self, path: str) -> OwnedFactSpec | None:
        """The entry of a fact's path, or of a path as a rule reads it."""
        own = own_path(path)
        if own in self._entries:
            return self._entries[own]
        return next((entry for known, entry in self._entries.items() if stands_for(known, own)), None)

    def nearest(self, path: str, sources: Iterable[FactSource]) -> str:
        """The path of these sources that was most likely meant, or empty text."""
        wanted = set(sources)
        paths = [known for known, entry in self._entries.items() if entry.spec.source in wanted]
        return next(iter(difflib.get_close_matches(path.lower(), paths, 1)), "") if len(path) <= 100 else ""


def own_path(path: str) -> str:
    """The path within one instance: without conditions, and without the words for one of several."""
    parts = plain_path(path).split(".")
    if parts[0] in PAIR_WORDS and len(parts) > 1:
        return ".".join(parts[1:])
    if parts[0] == INSTANCES and len(parts) > 2:
        return ".".join(parts[2:])
    return ".".join(parts)
