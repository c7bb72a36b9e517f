"""Variables that are not read and look as if somebody meant them to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from kvferry.config.advice import is_service_link
from kvferry.config.nodes import VARIABLE_PREFIX, Fault, Place, Source, fault, printable

_STEM = VARIABLE_PREFIX.removesuffix("__")


def near_misses(environment: Mapping[str, str], keys: Iterable[str]) -> list[Fault]:
    """One fault for each variable that would be passed over in silence. ``keys`` are those of the top.

    Variables that Kubernetes makes for a Service named ``kvferry`` are none of ours, and neither is
    ``KVFERRY_CONFIG``.
    """
    known = tuple(keys)
    faults = []
    for name in sorted(environment):
        if name.startswith(VARIABLE_PREFIX) or is_service_link(name, environment[name]):
            continue
        meant = _meant(name, known)
        if meant:
            place = Place(Source.ENVIRONMENT, name)
            what = "this variable is not read, although its name is close to one that is"
            faults.append(fault(place, (), what, remedy=f"write {printable(meant)}"))
    return faults


def _meant(name: str, keys: tuple[str, ...]) -> str:
    """How the variable is spelt if it is one of ours, or empty text."""
    upper = name.upper()
    if upper.startswith(VARIABLE_PREFIX):
        return upper
    rest = upper.removeprefix(f"{_STEM}_")
    if rest != upper:
        first, apart, _ = rest.lower().partition("__")
        section = next((key for key in keys if first == key), "")
        if not section and not apart:
            section = next((key for key in keys if first.startswith(f"{key}_")), "")
        if section == first:
            return VARIABLE_PREFIX + rest
        return f"{VARIABLE_PREFIX}{section.upper()}__..." if section else ""
    stem, apart, rest = upper.partition("__")
    near = len(stem) <= 2 * len(_STEM) and difflib.get_close_matches(stem, [_STEM], n=1, cutoff=0.85)
    return VARIABLE_PREFIX + rest if apart and near else ""
