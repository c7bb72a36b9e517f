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
        if len(path) > 100:
            return ""
        section, _, name = path.lower().rpartition(".")
        for near in difflib.get_close_matches(path.lower(), self._paths(sources), 5):
            # A long section that is right makes names look alike that have nothing in common.
            its_section, _, its_name = near.rpartition(".")
            if its_section != section or name in its_name or difflib.get_close_matches(name, [its_name]):
                return near
        return ""

    def beside(self, path: str, sources: Iterable[FactSource]) -> list[str]:
        """The paths of these sources in the section of ``path``, sorted."""
        section = path.lower().rpartition(".")[0]
        return sorted(known for known in self._paths(sources) if known.rpartition(".")[0] == section)

    def _paths(self, sources: Iterable[FactSource]) -> list[str]:
        wanted = set(sources)
        return [known for known, entry in self._entries.items() if entry.spec.source in wanted]


def own_path(path: str) -> str:
    """The path within one instance: without conditions, and without the words for one of several."""
    parts = plain_path(path).split(".")
    if parts[0] in PAIR_WORDS and len(parts) > 1:
        return ".".join(parts[1:])
    if parts[0] == INSTANCES and len(parts) > 2:
        return ".".join(parts[2:])
    return ".".join(parts)
