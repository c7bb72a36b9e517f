"""Whether the native copy loops can be used, and if not, why not."""

from __future__ import annotations

from kvferry.api import Fact
from kvferry.compat.guard import Raised, call_foreign
from kvferry.plugins.resolve import resolve

FINDER = "kvferry.data.native:find_native"
"""The data plane's own decision, named by string like every implementation: a second opinion here
could differ from what really copies."""


def native_facts(finder: str = FINDER) -> list[Fact]:
    """``native.available``, ``native.why`` and, when something is installed, ``native.version``.

    Imports the library: one that is installed and cannot be loaded is not available.
    """
    origin = "probe import kvferry_native"
    looked = call_foreign(lambda: resolve(finder, what="the native copy loops")())
    if isinstance(looked, Raised):
        return [
            Fact(path="native.available", value=False, origin=origin),
            Fact(path="native.why", value=f"its import failed with {looked}", origin=origin),
        ]
    status = looked.value
    facts = [
        Fact(path="native.available", value=status.module is not None, origin=origin),
        Fact(path="native.why", value=status.why, origin=origin),
    ]
    if status.version:
        facts.append(Fact(path="native.version", value=status.version, origin=origin))
    return facts
