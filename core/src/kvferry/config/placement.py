"""Keys that no section takes where they stand: told once it is known which section takes them."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field, frozen

from kvferry.config.advice import key_remedy, nearest, odd_letters, spelled
from kvferry.config.nodes import ConfigPath, Fault, Node, Source, dotted, fault


@frozen
class _Unknown:
    child: Node
    known: tuple[str, ...]


@define
class Placement:
    """What one run learns about which section takes which keys. Not shared between threads."""

    _known: dict[ConfigPath, tuple[str, ...]] = field(factory=dict)
    _unknown: list[_Unknown] = field(factory=list)

    def takes(self, section: ConfigPath, keys: Iterable[str]) -> None:
        """The section takes these keys, beside those told before."""
        self._known[section] = (*self._known.get(section, ()), *keys)

    def refuse(self, child: Node, known: Iterable[str]) -> None:
        """The key of ``child`` is none of those that its section takes, ``known``."""
        self._unknown.append(_Unknown(child, tuple(known)))

    def faults(self) -> list[Fault]:
        """One for every key refused."""
        return [self._fault(each.child, list(each.known)) for each in self._unknown]

    def _fault(self, child: Node, known: list[str]) -> Fault:
        key = child.path[-1]
        why = odd_letters(key) if nearest(key, known) else ""
        remedy = self._elsewhere(child, key) or key_remedy(child, key, known)
        return fault(child.key_place, child.path, "unknown key", why=why, remedy=remedy)

    def _elsewhere(self, child: Node, key: str) -> str:
        """Where the key belongs, if a section above or below this one takes it."""
        here = child.path[:-1]
        takers = [path for path, keys in self._known.items() if path != here and key in keys]
        below = [path for path in takers if path[: len(here)] == here]
        above = [path for path in takers if here[: len(path)] == path]
        if below:
            to = min(below, key=len)
            where = f"it belongs below {dotted(to[len(here) :])!r}"
        elif above:
            to = max(above, key=len)
            where = f"it belongs to {dotted(to)!r}" if to else "it belongs to the top"
        else:
            return ""
        source = child.key_place.source
        full = (*to, key)
        return f"{where}: {dotted(full) if source is Source.FILE else spelled(full, source)}"
