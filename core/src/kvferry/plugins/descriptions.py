"""The hooks that describe, the type each returns, and what makes a description well-formed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs
from attrs import frozen

from kvferry.api import (
    AnySpec,
    BackendCapabilities,
    BackendSpec,
    ChannelSpec,
    CommandSpec,
    ConnectorSpec,
    DeviceSpec,
    EvictionSpec,
    FactKind,
    FactSource,
    FactSpec,
    LookupSpec,
    Rule,
    SourceSpec,
    StagingSpec,
)
from kvferry.compat.guard import Raised
from kvferry.compat.validation import rule_faults
from kvferry.plugins.hookcalls import HookCalls
from kvferry.plugins.records import PluginState, Provided
from kvferry.plugins.refusal import Refusal
from kvferry.plugins.remedies import UPGRADE
from kvferry.plugins.resolve import IMPORT_STRING

SPEC_HOOKS: tuple[tuple[str, str, type[AnySpec]], ...] = (
    ("backend", "kvferry_backends", BackendSpec),
    ("channel", "kvferry_channels", ChannelSpec),
    ("lookup", "kvferry_lookups", LookupSpec),
    ("eviction", "kvferry_evictions", EvictionSpec),
    ("staging", "kvferry_stagings", StagingSpec),
    ("source", "kvferry_sources", SourceSpec),
    ("connector", "kvferry_connectors", ConnectorSpec),
    ("device", "kvferry_devices", DeviceSpec),
    ("command", "kvferry_commands", CommandSpec),
)
"""``(kind, hook, type)``."""

_SPEC_NAME = re.compile(r"[a-z0-9]+([-_][a-z0-9]+)*")
_FACT_PATH = re.compile(r"[a-z0-9_]+(\.([a-z0-9_]+|\*))+")
_IMPORT_FIELDS = ("factory", "options")


@frozen(kw_only=True)
class Descriptions:
    """Everything one plugin says of itself, checked."""

    specs: tuple[tuple[Provided, AnySpec], ...]
    rules: tuple[Rule, ...]
    fact_specs: tuple[FactSpec, ...] = ()

    @property
    def provides(self) -> tuple[Provided, ...]:
        return tuple(provided for provided, _ in self.specs)


def describe(hooks: HookCalls, plugin: str, rule_prefix: str) -> Descriptions:
    """Call every describing hook of a registered plugin and check what comes back.

    Raises :class:`Refusal` with all faults of the plugin in one reason.
    """
    specs: list[tuple[Provided, AnySpec]] = []
    faults: list[str] = []
    errors: list[BaseException] = []
    for kind, hook, spec_type in SPEC_HOOKS:
        called = hooks.call(plugin, hook)
        if isinstance(called, Raised):
            faults.append(f"{hook} failed with {called}")
            errors.append(called.error)
            continue
        for item in called.value:
            found = tuple(_spec_faults(hook, item, spec_type))
            faults += found
            if not found:
                specs.append((Provided(kind=kind, name=item.name), item))
    faults += _twice(specs)
    rules: tuple[Rule, ...] = ()
    called = hooks.call(plugin, "kvferry_rules")
    if isinstance(called, Raised):
        faults.append(f"kvferry_rules failed with {called}")
        errors.append(called.error)
    else:
        strangers = [item for item in called.value if not isinstance(item, Rule)]
        faults += [f"kvferry_rules gave {item!r}, not a Rule" for item in strangers]
        rules = tuple(item for item in called.value if isinstance(item, Rule))
        faults += rule_faults(rules, rule_prefix)
    fact_specs: tuple[FactSpec, ...] = ()
    called = hooks.call(plugin, "kvferry_fact_specs")
    if isinstance(called, Raised):
        faults.append(f"kvferry_fact_specs failed with {called}")
        errors.append(called.error)
    else:
        found = tuple(_fact_spec_faults(called.value))
        faults += found
        fact_specs = () if found else called.value
    if faults:
        raise Refusal(
            PluginState.FAILED,
            "; ".join(faults),
            UPGRADE,
            errors[0] if errors else None,
        )
    return Descriptions(specs=tuple(specs), rules=rules, fact_specs=fact_specs)


def _spec_faults(hook: str, item: object, spec_type: type[AnySpec]) -> Iterator[str]:
    if not isinstance(item, spec_type):
        yield f"{hook} gave {item!r}, not a {spec_type.__name__}"
        return
    name = item.name
    if not isinstance(name, str) or _SPEC_NAME.fullmatch(name) is None:
        yield f"{hook} gave the name {name!r}; names are lower-case words joined by - or _"
        return
    for field in attrs.fields(spec_type):
        if field.name in _IMPORT_FIELDS:
            optional = field.default is None
            yield from _import_faults(hook, name, field.name, getattr(item, field.name), optional)
    if isinstance(item, BackendSpec) and not isinstance(item.capabilities, BackendCapabilities):
        yield f"{hook} gave {name!r} capabilities that are not BackendCapabilities"


def _fact_spec_faults(items: tuple[object, ...]) -> Iterator[str]:
    paths: set[str] = set()
    for item in items:
        if not isinstance(item, FactSpec):
            yield f"kvferry_fact_specs gave {item!r}, not a FactSpec"
        elif not isinstance(item.path, str) or _FACT_PATH.fullmatch(item.path) is None:
            yield f"kvferry_fact_specs gave the path {item.path!r}; paths are dotted lower-case words"
        elif not isinstance(item.kind, FactKind) or not isinstance(item.source, FactSource):
            yield f"kvferry_fact_specs gave {item.path!r} a kind or a source that kvferry.api does not have"
        elif not isinstance(item.meaning, str) or not item.meaning.strip():
            yield f"kvferry_fact_specs does not say what {item.path!r} means"
        elif item.path in paths:
            yield f"kvferry_fact_specs gave {item.path!r} twice"
        else:
            paths.add(item.path)


def _import_faults(hook: str, name: str, field: str, value: object, optional: bool) -> Iterator[str]:
    if value is None and optional:
        return
    if not isinstance(value, str) or IMPORT_STRING.fullmatch(value) is None:
        yield (f"{hook} gave {name!r} the {field} {value!r}; it reads package.module:attribute")


def _twice(specs: list[tuple[Provided, AnySpec]]) -> Iterator[str]:
    seen: set[Provided] = set()
    for provided, _ in specs:
        if provided in seen:
            yield f"it gives {provided} twice"
        seen.add(provided)
