"""Core's own plugin: always registered, first in every list, judged by the same gates."""

from __future__ import annotations

from kvferry.api import EvictionSpec, Fact, FactSpec, HostEnvironment, Manifest, Rule, hookimpl
from kvferry.compat.core_facts import CORE_FACTS
from kvferry.compat.core_rules import RULE_PREFIX, core_rules
from kvferry.plugins.hostfacts import host_facts
from kvferry.plugins.nativefacts import native_facts

MANIFEST = Manifest(
    name="core",
    api=">=1.0,<2",
    rule_prefix=RULE_PREFIX,
    summary="what kvferry brings itself",
)


@hookimpl
def kvferry_evictions() -> list[EvictionSpec]:
    """The policy that needs no plugin."""
    return [
        EvictionSpec(
            name="lru",
            factory="kvferry.control.lru:LRU",
            options=None,
            summary="least recently used goes first",
        )
    ]


@hookimpl
def kvferry_facts(env: HostEnvironment) -> list[Fact]:
    """The machine, the interpreter and the native copy loops."""
    return [*host_facts(env), *native_facts()]


@hookimpl
def kvferry_fact_specs() -> tuple[FactSpec, ...]:
    """What every engine, host and backend has."""
    return CORE_FACTS


@hookimpl
def kvferry_rules() -> tuple[Rule, ...]:
    """The rules about tiers, engine and machine."""
    return core_rules()
