"""How facts are written in reports."""

from __future__ import annotations

import re

from kvferry.api import Fact
from kvferry.compat.views import FactView

PLACEHOLDER = re.compile(r"\{([^{}:]+)(?::(size|names))?\}")
UNKNOWN = "(unknown)"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def placeholders(template: str) -> tuple[tuple[str, str], ...]:
    """``(path, format)`` of every placeholder of a rule's message or fix."""
    return tuple((match[1], match[2] or "") for match in PLACEHOLDER.finditer(template))


def size_text(count: int) -> str:
    """A byte count for people: exact when it is a whole number of a unit, else one decimal."""
    value, unit = float(count), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if count == 1:
        return "1 byte"
    number = f"{value:.0f}" if value == int(value) else f"{value:.1f}"
    return f"{number} {_UNITS[unit]}"


def value_text(value: object, form: str = "") -> str:
    """The value as it reads in a sentence; ``form`` ``size`` writes byte counts with a unit."""
    if isinstance(value, tuple | list):
        # Of several members those that have nothing are not counted up.
        return ", ".join(value_text(item, form) for item in value if item not in ((), [])) or "none"
    if form == "size" and isinstance(value, int) and not isinstance(value, bool):
        return size_text(value)
    return "not set" if value is None else str(value)


def fill(template: str, facts: FactView) -> str:
    """``template`` with each ``{path}`` or ``{path:size}`` replaced by the fact's value, and each
    ``{path:names}`` by the names of the members behind it."""

    def replace(match: re.Match[str]) -> str:
        if match[2] == "names":
            return ", ".join(facts.member_names(match[1])) or "none"
        fact = facts.get(match[1])
        return UNKNOWN if fact is None else value_text(fact.value, match[2] or "")

    return PLACEHOLDER.sub(replace, template)


def fact_text(fact: Fact, form: str = "") -> str:
    """``path = value`` as the configuration would write it; what comes from elsewhere has strings quoted,
    and a byte count also reads with its unit."""
    if fact.written:
        return f"{fact.path} = {fact.written}"
    shown = repr(fact.value)
    if form == "size" and isinstance(fact.value, int) and not isinstance(fact.value, bool):
        shown = f"{int(fact.value)} ({size_text(fact.value)})"
    return f"{fact.path} = {shown}"
