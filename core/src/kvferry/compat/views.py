"""How a rule with ``*`` in its paths sees the facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvferry.api import Fact, Facts

WILDCARD = "*"


def members(facts: Iterable[str], section: str) -> tuple[str, ...]:
    """Names right below ``section`` in the given paths, sorted.

    ``members(["tiers.cpu.use", "tiers.ssd.use"], "tiers")`` is ``("cpu", "ssd")``.
    """
    prefix = f"{section}."
    names = {path[len(prefix) :].split(".", 1)[0] for path in facts if path.startswith(prefix)}
    return tuple(sorted(names - {""}))


def bind(path: str, section: str | None, member: str | None) -> str:
    """``path`` with the wildcard below ``section`` replaced by ``member``."""
    if section is None or member is None:
        return path
    head = f"{section}.{WILDCARD}"
    if path == head or path.startswith(f"{head}."):
        return f"{section}.{member}{path[len(head) :]}"
    return path


def expand(path: str, facts: Facts) -> tuple[str, ...] | None:
    """The concrete paths that ``path`` with one wildcard stands for; ``None`` without a wildcard.

    A member of the section that lacks the rest of the path is listed too: what is missing for one
    member must not look as if it held for all.
    """
    parts = path.split(".")
    if WILDCARD not in parts:
        return None
    at = parts.index(WILDCARD)
    section = ".".join(parts[:at])
    return tuple(".".join([*parts[:at], member, *parts[at + 1 :]]) for member in members(facts, section))


class FactView(Mapping[str, Fact]):
    """The facts as one application of a rule reads them.

    With ``section`` and ``member``, ``section.*.x`` is the member's own ``x``. Any other path with a
    ``*`` is collected: its value is the tuple of that fact over all members of its section, empty
    when there are no members, and missing when one member lacks it.
    """

    def __init__(self, facts: Facts, section: str | None = None, member: str | None = None) -> None:
        self._facts = facts
        self._section = section
        self._member = member

    def __getitem__(self, path: str) -> Fact:
        bound = bind(path, self._section, self._member)
        concrete = expand(bound, self._facts)
        if concrete is None:
            return self._facts[bound]
        found = [self._facts[each] for each in concrete]
        return Fact(
            path=bound,
            value=tuple(fact.value for fact in found),
            origin=", ".join(dict.fromkeys(fact.origin for fact in found)),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def concrete(self, path: str) -> tuple[str, ...]:
        """The plain paths behind ``path``: one without a collecting wildcard, else one per member.

        For a section without members it is the section itself, where that is a fact: an empty
        ``tiers`` also stands somewhere.
        """
        bound = bind(path, self._section, self._member)
        expanded = expand(bound, self._facts)
        if expanded is None:
            return (bound,)
        section = bound.split(f".{WILDCARD}", 1)[0]
        return expanded or ((section,) if section in self._facts else ())
