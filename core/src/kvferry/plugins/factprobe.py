"""Facts about the host, gathered plugin by plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from kvferry.api import ErrorKind, Fact, HostEnvironment, KVFerryError, Retry
from kvferry.compat.guard import Raised
from kvferry.plugins.hookcalls import HookCalls
from kvferry.plugins.records import PluginRecord
from kvferry.plugins.remedies import UPGRADE


@frozen(kw_only=True)
class ProbedFacts:
    """Facts by path, and one fault for each plugin that could not give its own.

    ``required_faults`` are those of plugins that the user did not allow to be skipped.
    """

    facts: Mapping[str, Fact]
    required_faults: tuple[KVFerryError, ...] = ()
    skipped_faults: tuple[KVFerryError, ...] = ()


def probe_facts(
    hooks: HookCalls, plugins: Sequence[PluginRecord], environment: HostEnvironment
) -> ProbedFacts:
    """Call ``kvferry_facts`` of each plugin. A plugin whose hook fails or gives anything that is not
    a fact, or a fact that an earlier plugin gave, loses all its facts and nothing else."""
    facts: dict[str, Fact] = {}
    owners: dict[str, str] = {}
    required: list[KVFerryError] = []
    skipped: list[KVFerryError] = []
    for plugin in plugins:
        called = hooks.call(plugin.name, "kvferry_facts", env=environment)
        if isinstance(called, Raised):
            fault = f"kvferry_facts failed with {called}"
        else:
            fault = _fault(called.value, owners)
        if not fault and not isinstance(called, Raised):
            facts.update({fact.path: fact for fact in called.value})
            owners.update({fact.path: plugin.name for fact in called.value})
            continue
        error = KVFerryError(
            f"plugin '{plugin.name}' could not say what this host has",
            kind=ErrorKind.PLUGIN,
            where=plugin.origin,
            why=fault,
            remedy=UPGRADE,
            retry=Retry.AFTER_CHANGE,
        )
        (required if plugin.required else skipped).append(error)
    return ProbedFacts(facts=facts, required_faults=tuple(required), skipped_faults=tuple(skipped))


def _fault(items: tuple[object, ...], owners: Mapping[str, str]) -> str:
    paths: set[str] = set()
    for item in items:
        if not isinstance(item, Fact) or not (isinstance(item.path, str) and isinstance(item.origin, str)):
            return f"kvferry_facts gave {item!r}, not a Fact with a path and an origin"
        if item.path in owners:
            return f"the fact {item.path!r} is already given by plugin '{owners[item.path]}'"
        if item.path in paths:
            return f"it gives the fact {item.path!r} twice"
        paths.add(item.path)
    return ""
