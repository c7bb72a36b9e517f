"""How a rule with ``*`` in its paths sees the facts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from kvferry.api import Fact, Facts

WILDCARD = "*"
INSTANCES = "instances"
"""Section of the facts of several instances, by label."""
PAIR_WORDS = ("one", "other")
"""How a rule about two instances begins the paths of each."""

_SEGMENT = re.compile(r"\*(?:\[[^\[\]]+\])*|[^.]+")
_CONDITION = re.compile(r"\[([^\[\]]+)\]")

Paths: TypeAlias = "str | tuple[Paths, ...]"
"""A plain path, or what a wildcard stands for: one item for each member."""


def members(facts: Iterable[str], section: str) -> tuple[str, ...]:
    """Names right below ``section`` in the given paths, sorted.

    ``members(["tiers.cpu.use", "tiers.ssd.use"], "tiers")`` is ``("cpu", "ssd")``.
    """
    prefix = f"{section}."
    names = {path[len(prefix) :].split(".", 1)[0] for path in facts if path.startswith(prefix)}
    return tuple(sorted(names - {""}))


def bind(path: str, bindings: Mapping[str, str]) -> str:
    """``path`` with its beginning replaced: ``tiers.*.use`` becomes ``tiers.cpu.use``."""
    for head, replacement in bindings.items():
        if path == head or path.startswith(f"{head}."):
            return replacement + path[len(head) :]
    return path


def bound_text(text: str, bindings: Mapping[str, str]) -> str:
    """A formula with the paths in it replaced as :func:`bind` does."""
    for head, replacement in bindings.items():
        # A path goes on behind a plain word; a collecting wildcard has conditions behind it.
        behind = r"(?![\[\w])" if head.endswith(WILDCARD) else r"(?=\.[\w*])"
        text = re.sub(rf"(?<![\w.]){re.escape(head)}{behind}", replacement.replace("\\", r"\\"), text)
    return text


def plain_path(path: str) -> str:
    """``path`` without the conditions of its wildcards, as a catalogue lists it."""
    return _CONDITION.sub("", path)


def stands_for(pattern: str, path: str) -> bool:
    """Whether ``path`` is what ``pattern`` becomes when its wildcards get names; both without
    conditions."""
    parts, others = pattern.split("."), path.split(".")
    return len(parts) == len(others) and all(
        part in (WILDCARD, other) for part, other in zip(parts, others, strict=True)
    )


def looked_at(path: str) -> tuple[str, ...]:
    """``path`` without its conditions, and the paths that the conditions look at."""
    parts = _SEGMENT.findall(path)
    found = [plain_path(path)]
    for index, part in enumerate(parts):
        before = ".".join([*map(plain_path, parts[:index]), WILDCARD])
        found += [f"{before}.{condition}" for condition in _CONDITION.findall(part)]
    return tuple(dict.fromkeys(found))


def expand(path: str, facts: Facts) -> Paths:
    """The plain paths that ``path`` stands for, nested as its wildcards are.

    A member of the section that lacks the rest of the path is listed too: what is missing for one
    member must not look as if it held for all. Only a condition leaves members out.
    """
    parts = _SEGMENT.findall(path)
    at = next((index for index, part in enumerate(parts) if part.startswith(WILDCARD)), None)
    if at is None:
        return path
    section, behind = ".".join(parts[:at]), parts[at + 1 :]
    conditions = _CONDITION.findall(parts[at])
    return tuple(
        expand(".".join([section, member, *behind]), facts)
        for member in members(facts, section)
        if all(_is_true(facts, f"{section}.{member}.{condition}") for condition in conditions)
    )


def _is_true(facts: Facts, path: str) -> bool:
    fact = facts.get(path)
    return fact is not None and bool(fact.value)


class FactView(Mapping[str, Fact]):
    """The facts as one application of a rule reads them.

    ``bindings`` replace the beginnings of paths: with ``{"tiers.*": "tiers.cpu"}``, ``tiers.*.x`` is
    that member's own ``x``. Any other path with a ``*`` is collected: its value is the tuple of that
    fact over all members of its section, empty when there are no members, and missing when one
    member lacks it. A wildcard behind a wildcard gives tuples in a tuple.
    """

    def __init__(self, facts: Facts, bindings: Mapping[str, str] | None = None) -> None:
        self._facts = facts
        self._bindings = bindings or {}

    def __getitem__(self, path: str) -> Fact:
        bound = bind(path, self._bindings)
        if WILDCARD not in bound:
            return self._facts[bound]
        paths = expand(bound, self._facts)
        origins = (self._facts[each].origin for each in _flat(paths))
        return Fact(path=bound, value=self._values(paths), origin=", ".join(dict.fromkeys(origins)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def concrete(self, path: str) -> tuple[str, ...]:
        """The plain paths behind ``path``: one without a collecting wildcard, else one per member.

        For a section without members it is the section itself, where that is a fact: an empty
        ``tiers`` also stands somewhere.
        """
        bound = bind(path, self._bindings)
        if WILDCARD not in bound:
            return (bound,)
        found = tuple(_flat(expand(bound, self._facts)))
        section = bound.split(f".{WILDCARD}", 1)[0]
        return found or ((section,) if section in self._facts else ())

    def member_names(self, path: str) -> tuple[str, ...]:
        """The names that the first wildcard of ``path`` stands for, sorted; none for a path without one."""
        bound = bind(path, self._bindings)
        collecting = bound if WILDCARD in bound else path
        if WILDCARD not in collecting:
            return ()
        at = collecting.split(f".{WILDCARD}", 1)[0].count(".") + 1
        return tuple(dict.fromkeys(each.split(".")[at] for each in _flat(expand(bound, self._facts))))

    def text(self, formula: object) -> str:
        """A formula as it reads here."""
        return bound_text(str(formula), self._bindings)

    def _values(self, paths: Paths) -> object:
        if isinstance(paths, str):
            return self._facts[paths].value
        return tuple(self._values(each) for each in paths)


def _flat(paths: Paths) -> Iterator[str]:
    if isinstance(paths, str):
        yield paths
    else:
        for each in paths:
            yield from _flat(each)
