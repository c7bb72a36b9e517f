"""What is usable after loading: typed look-ups of specs, facts and rules, and a row per plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs
from attrs import frozen

from kvferry.api import (
    AnySpec,
    BackendSpec,
    ChannelSpec,
    CommandSpec,
    ConnectorSpec,
    DeviceSpec,
    ErrorKind,
    EvictionSpec,
    HostEnvironment,
    KVFerryError,
    KVFerryErrors,
    LookupSpec,
    Retry,
    SourceSpec,
    StagingSpec,
)
from kvferry.compat import OwnedFactSpec, OwnedRule
from kvferry.plugins.factprobe import ProbedFacts, probe_facts
from kvferry.plugins.hints import closest, did_you_mean, one_of
from kvferry.plugins.hookcalls import HookCalls
from kvferry.plugins.implementation import checked, implementation_faults
from kvferry.plugins.records import PluginRecord, PluginState
from kvferry.plugins.remedies import UPGRADE, mend
from kvferry.plugins.resolve import resolve
from kvferry.plugins.shapes import Shape, shape_of

S = TypeVar("S", bound=AnySpec)


@frozen(kw_only=True)
class OwnedSpec:
    """A spec and the row of the plugin that brought it."""

    kind: str
    spec: AnySpec
    plugin: PluginRecord

    @property
    def label(self) -> str:
        """``backend 'cpu' of plugin 'backend_cpu' (kvferry-backend-cpu 0.1.0)``."""
        owner = f"plugin '{self.plugin.name}' ({self.plugin.distribution})"
        return f"{self.kind} {self.spec.name!r} of {owner}"


@frozen(kw_only=True)
class LoadedPlugins:
    """The result of loading. Frozen; look-ups are dictionary reads and call no hook.

    Threads: look-ups from any; :meth:`facts` from one at a time.
    """

    records: tuple[PluginRecord, ...]
    """The built-in plugin first, then the listed ones in their order, then the rest by name."""
    _specs: Mapping[tuple[str, str], OwnedSpec]
    _rules: tuple[OwnedRule, ...]
    _fact_specs: tuple[OwnedFactSpec, ...]
    _hooks: HookCalls = attrs.field(eq=False, repr=False)

    def backend(self, name: str) -> BackendSpec:
        """The backend of this name. All look-ups raise :class:`KVFerryError` (kind ``CONFIG``) that
        says what there is instead."""
        return self._typed("backend", name, BackendSpec)

    def eviction(self, name: str) -> EvictionSpec:
        return self._typed("eviction", name, EvictionSpec)

    def connector(self, name: str) -> ConnectorSpec:
        return self._typed("connector", name, ConnectorSpec)

    def device(self, name: str) -> DeviceSpec:
        return self._typed("device", name, DeviceSpec)

    def channel(self, name: str) -> ChannelSpec:
        return self._typed("channel", name, ChannelSpec)

    def lookup(self, name: str) -> LookupSpec:
        return self._typed("lookup", name, LookupSpec)

    def staging(self, name: str) -> StagingSpec:
        return self._typed("staging", name, StagingSpec)

    def source(self, name: str) -> SourceSpec:
        return self._typed("source", name, SourceSpec)

    def command(self, name: str) -> CommandSpec:
        return self._typed("command", name, CommandSpec)

    def specs(self, kind: str) -> tuple[OwnedSpec, ...]:
        """All usable specs of one kind, in the order of the plugins."""
        return tuple(owned for owned in self._specs.values() if owned.kind == kind)

    def owned(self, kind: str, name: str) -> OwnedSpec:
        """The spec with its owner. Raises like :meth:`backend`."""
        found = self._specs.get((kind, name))
        if found is None:
            raise self._unknown(kind, name)
        return found

    def factory(self, kind: str, name: str) -> Callable[..., Any]:
        """Import the implementation and return what builds it. The last gate; cold path only.

        Raises :class:`KVFerryError` when there is no such spec, its factory cannot be imported, or what
        it names does not fit the contract: a method is missing, or a call would not work. Where only
        the object can tell, the returned factory raises instead of handing it out.
        """
        owned = self.owned(kind, name)
        factory = resolve(_import_string(owned, "factory"), what=owned.label)
        if not callable(factory):
            raise _misnamed(owned, "factory", "something that cannot be called")
        shape = shape_of(owned.spec)
        if shape is None:
            raise _misnamed(owned, "factory", "what core never builds")
        faults = implementation_faults(factory, shape)
        if faults:
            raise _unfit(owned, shape, "; ".join(faults))
        return checked(factory, shape, lambda why: _unfit(owned, shape, why))

    def check_implementation(self, kind: str, name: str) -> None:
        """Pass the last gate for a chosen spec and build nothing. Raises like :meth:`factory`."""
        if hasattr(self.owned(kind, name).spec, "factory"):
            self.factory(kind, name)

    def options_class(self, kind: str, name: str) -> type[Any] | None:
        """Import the attrs class of the spec's own keys; ``None`` when it has none.

        Raises like :meth:`factory`.
        """
        owned = self.owned(kind, name)
        if getattr(owned.spec, "options", None) is None:
            return None
        options = resolve(_import_string(owned, "options"), what=owned.label)
        if not isinstance(options, type) or not attrs.has(options):
            raise _misnamed(owned, "options", "something that is not an attrs class")
        return options

    def rules(self) -> tuple[OwnedRule, ...]:
        """The rules of all ready plugins, core's first."""
        return self._rules

    def fact_specs(self) -> tuple[OwnedFactSpec, ...]:
        """What the ready plugins say about the facts they know, core's first."""
        return self._fact_specs

    def facts(self, environment: HostEnvironment) -> ProbedFacts:
        """Probe this host through every ready plugin; one that fails loses only its own facts."""
        ready = [record for record in self.records if record.state is PluginState.READY]
        return probe_facts(self._hooks, ready, environment)

    def faults(self) -> tuple[KVFerryError, ...]:
        """One error for every listed plugin that is required and not usable."""
        return tuple(r.as_error() for r in self.records if r.broken and r.required)

    def skipped(self) -> tuple[PluginRecord, ...]:
        """Rows that are not usable and that the user allowed to be skipped."""
        return tuple(r for r in self.records if r.broken and not r.required)

    def raise_for_faults(self) -> None:
        """Raise :class:`KVFerryErrors` with all of :meth:`faults`, or return."""
        faults = self.faults()
        if faults:
            raise KVFerryErrors(
                f"{len(faults)} of the listed plugins cannot be used",
                faults,
                kind=ErrorKind.PLUGIN,
            )

    def monitor_hook_calls(self, before: Callable[[str], None]) -> Callable[[], None]:
        """For tests: call ``before`` with the name on every hook call; returns how to stop."""
        return self._hooks.monitor(before)

    def _typed(self, kind: str, name: str, spec_type: type[S]) -> S:
        spec = self.owned(kind, name).spec
        if not isinstance(spec, spec_type):  # the loader checked it
            raise self._unknown(kind, name)
        return spec

    def _unknown(self, kind: str, name: str) -> KVFerryError:
        names = [owned.spec.name for owned in self.specs(kind)]
        hint = self._unlisted_hint(kind, name) or did_you_mean(name, names)
        hint = hint or self._unlisted_slip_hint(kind, name)
        broken = [record.name for record in self.records if record.broken]
        why = f"the listed plugins provide: {one_of(names)}"
        if broken:
            why += f"; not usable: {', '.join(broken)}"
            first = "mend the plugins that are not usable first"
            hint = f"{hint} Otherwise {first}" if hint.endswith("?") else hint or first
        # A configuration fault: the name is wrong, or its plugin is not listed. A plugin that is
        # listed and broken has a fault of its own.
        return KVFerryError(
            f"there is no {kind} {name!r}",
            kind=ErrorKind.CONFIG,
            why=why,
            remedy=hint or f"list the plugin that provides {kind} {name!r} under plugins",
            retry=Retry.AFTER_CHANGE,
        )

    def offering(self, kind: str) -> Mapping[str, str]:
        """What plugins that are installed and not listed say that they provide: name of the spec, and
        of the plugin. Says nothing of a plugin that the user meant and misspelt."""
        meant = {record.meant for record in self.records}
        return {
            offer.name: record.name
            for record in self.records
            if record.state is PluginState.FOUND and record.name not in meant
            for offer in record.offers
            if offer.kind == kind
        }

    def _unlisted_hint(self, kind: str, name: str) -> str:
        plugin = self.offering(kind).get(name)
        if plugin is None:
            # One that does not say what it provides can be guessed by its name.
            meant = {record.meant for record in self.records}
            likely = [
                record.name
                for record in self.records
                if record.state is PluginState.FOUND and not record.offers and record.name not in meant
            ]
            plugin = next((each for each in likely if each.split("_")[-1] == name), None)
        return f"{plugin!r} is installed and not listed: add it under plugins" if plugin else ""

    def _unlisted_slip_hint(self, kind: str, name: str) -> str:
        offered = self.offering(kind)
        near = closest(name, offered)
        if near is None:
            return ""
        return f"did you mean {near!r}? Its plugin {offered[near]!r} is installed and not listed"


def _import_string(owned: OwnedSpec, field: str) -> str:
    value = getattr(owned.spec, field, None)
    if not isinstance(value, str):
        raise _misnamed(owned, field, "nothing")
    return value


def _misnamed(owned: OwnedSpec, field: str, found: str) -> KVFerryError:
    return KVFerryError(
        f"{owned.label} cannot be built",
        kind=ErrorKind.PLUGIN,
        why=f"its {field} names {found}",
        remedy=UPGRADE,
        retry=Retry.AFTER_CHANGE,
    )


def _unfit(owned: OwnedSpec, shape: Shape, why: str) -> KVFerryError:
    contract = shape.protocol
    shape_named = "" if contract is None else mend(f"give it the shape of kvferry.api.{contract.__name__}")
    return KVFerryError(
        f"{owned.label} does not fit the contract",
        kind=ErrorKind.PLUGIN,
        why=why,
        remedy=shape_named or UPGRADE,
        retry=Retry.AFTER_CHANGE,
    )
