"""What an engine start and ``kvferry check`` do alike: read, load, judge, and tell all of it at once."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import evolve, frozen

from kvferry.api import (
    AnySpec,
    BackendCapabilities,
    ChannelCapabilities,
    ErrorKind,
    Fact,
    HostEnvironment,
    KVFerryError,
    KVFerryErrors,
    Retry,
)
from kvferry.compat import JudgedWaiver, Waiver, check
from kvferry.compat.waivers import unknown_waivers
from kvferry.config import Config, ConfigSources, OnError, OwnKeys, RawConfig, Selection, read_core
from kvferry.plugins import (
    DistributionSource,
    LoadedPlugins,
    PluginRequest,
    ProbedFacts,
    installed_distributions,
    load_plugins,
)
from kvferry.plugins.descriptions import SPEC_HOOKS
from kvferry.runtime.examination import Examination

EngineFacts = Callable[[Config], Iterable[Fact]]
"""Facts about the engine. They may depend on the configuration: a chunk's bytes follow from
``chunk_tokens``."""

_KIND_OF: Mapping[type[AnySpec], str] = {spec_type: kind for kind, _, spec_type in SPEC_HOOKS}


def no_engine(config: Config) -> Iterable[Fact]:
    """The facts when no engine is there, as when a file is checked by itself."""
    del config
    return ()


@frozen(kw_only=True)
class Reading:
    """A configuration and its plugins before any rule has judged.

    ``config`` is ``None`` when ``config_faults`` is not empty or an options class is broken.
    """

    name: str
    plugins: LoadedPlugins
    config: Config | None
    config_faults: tuple[KVFerryError, ...]
    plugin_faults: tuple[KVFerryError, ...]
    waivers: tuple[Waiver, ...] = ()
    """Those that could be read, whatever else is wrong."""


@frozen(kw_only=True)
class Prepared:
    """Everything a start needs, found fit."""

    config: Config
    plugins: LoadedPlugins
    examination: Examination


def requests_of(raw: RawConfig) -> list[PluginRequest]:
    """The entries of ``plugins:`` as the loader takes them."""
    return [
        PluginRequest(
            name=entry.name,
            distribution=entry.distribution,
            required=entry.on_error is OnError.FAIL,
            origin=entry.origin,
        )
        for entry in raw.plugins
    ]


def read(
    sources: ConfigSources,
    *,
    connector: str | None = None,
    distributions: DistributionSource = installed_distributions,
    implementations: bool = False,
) -> Reading:
    """Read the configuration and load the plugins that it lists. Never raises for their sake.

    ``connector`` is the host's own name for itself, for a ``connector:`` section without ``use``. With
    ``implementations``, what the configuration chose is imported too and compared with the contract.
    """
    raw = read_core(sources)
    plugins = load_plugins(requests_of(raw), distributions=distributions)
    config, faults = _structure(raw, plugins, connector)
    if implementations:
        # Options and implementation may be missing for the same reason at the same place.
        told = {(fault.where, fault.why) for fault in faults}
        found = _implementation_faults(raw, plugins)
        faults += tuple(fault for fault in found if (fault.where, fault.why) not in told)
    return Reading(
        name=raw.name,
        plugins=plugins,
        config=config,
        config_faults=tuple(fault for fault in faults if fault.kind is not ErrorKind.PLUGIN),
        plugin_faults=(
            *plugins.faults(),
            *(fault for fault in faults if fault.kind is ErrorKind.PLUGIN),
        ),
        waivers=tuple(
            Waiver(rule_id=rule_id, reason=reason, origin=place)
            for rule_id, reason, place in (raw.waivers if raw.plugins_readable else ())
        ),
    )


def examine(
    sources: ConfigSources,
    environment: HostEnvironment,
    engine_facts: EngineFacts = no_engine,
    *,
    connector: str | None = None,
    distributions: DistributionSource = installed_distributions,
) -> Examination:
    """Read, load, probe this host and apply every rule. Never raises for what it finds.

    Rules are not applied to a configuration with faults: its facts are incomplete, and complaints
    about what could not be read would mislead.
    """
    reading = read(sources, connector=connector, distributions=distributions, implementations=True)
    reading = on_this_host(reading, environment)
    return judge(reading, reading.plugins.facts(environment), engine_facts)


def on_this_host(reading: Reading, environment: HostEnvironment) -> Reading:
    """The same reading, with a fault where ``runtime_dir`` cannot be a folder on this host."""
    folder = None if reading.config is None else reading.config.runtime_dir
    if reading.config is None or folder is None:
        return reading
    path = Path(environment.root, folder.lstrip("/"))
    # Unlike a path's own methods these two raise nothing where the user may not look.
    blocked = next(
        (each for each in (path, *path.parents) if os.path.exists(each) and not os.path.isdir(each)),
        None,
    )
    if blocked is None:
        return reading
    origin = next(leaf.origin for leaf in reading.config.leaves if leaf.path == ("runtime_dir",))
    fault = KVFerryError(
        "runtime_dir: it cannot be a folder",
        kind=ErrorKind.CONFIG,
        where=origin,
        why=f"{blocked} is there already and is none",
        remedy="name a folder that this user may write, or one that is not there yet",
        retry=Retry.AFTER_CHANGE,
    )
    return evolve(reading, config=None, config_faults=(*reading.config_faults, fault))


def judge(
    reading: Reading, probed: ProbedFacts, engine_facts: EngineFacts = no_engine, *, not_judged: str = ""
) -> Examination:
    """Apply every rule to what was read, with these facts about the host.

    ``not_judged`` says why no rule may be applied although the configuration is without faults.
    """
    plugins, config = reading.plugins, reading.config
    facts = dict(probed.facts)
    report = None
    if config is not None:
        facts.update(_spec_facts(plugins, config))
        facts.update(config.facts())
        facts.update({fact.path: fact for fact in engine_facts(config)})
        if not not_judged:
            report = check(plugins.rules(), facts, waivers_of(config))
    return Examination(
        name=reading.name,
        plugins=plugins,
        config=config,
        facts=facts,
        config_faults=reading.config_faults,
        plugin_faults=(*reading.plugin_faults, *probed.required_faults),
        skipped=(*(row.as_error() for row in plugins.skipped()), *probed.skipped_faults),
        report=report,
        waivers=_unknown_waivers(reading) if report is None else (),
        not_judged="" if config is None else not_judged,
    )


def _unknown_waivers(reading: Reading) -> tuple[JudgedWaiver, ...]:
    """Rules of a plugin that cannot be used are not known, so nothing is said while there is one."""
    if any(record.broken for record in reading.plugins.records):
        return ()
    return unknown_waivers(reading.waivers, reading.plugins.rules())


def prepare(
    sources: ConfigSources,
    environment: HostEnvironment,
    engine_facts: EngineFacts = no_engine,
    *,
    connector: str | None = None,
    distributions: DistributionSource = installed_distributions,
) -> Prepared:
    """:func:`examine`, and refuse to go on with an error or an error rule that is unverified.

    Raises :class:`KVFerryError` whose text contains the text of ``kvferry check``; every process of
    an engine that calls this with the same facts raises the same text.
    """
    examination = examine(
        sources, environment, engine_facts, connector=connector, distributions=distributions
    )
    config = examination.config
    if config is None or examination.prevents_start:
        raise KVFerryError(
            f"kvferry does not start with this configuration\n\n{examination.text()}",
            kind=_kind(examination),
            retry=Retry.AFTER_CHANGE,
        )
    return Prepared(config=config, plugins=examination.plugins, examination=examination)


def _kind(examination: Examination) -> ErrorKind:
    if examination.plugin_faults:
        return ErrorKind.PLUGIN
    return ErrorKind.CONFIG if examination.config_faults else ErrorKind.COMPATIBILITY


def _structure(
    raw: RawConfig, plugins: LoadedPlugins, connector: str | None
) -> tuple[Config | None, tuple[KVFerryError, ...]]:
    def options_of(selection: Selection) -> type[Any] | OwnKeys | None:
        kind = _KIND_OF[selection.spec]
        name = selection.use
        if name is None and kind == "connector":
            name = connector or _only_connector(plugins)
            if name is None and selection.keys:
                return _ownerless(raw, selection, plugins)
        if not raw.plugins_readable and name not in {owned.spec.name for owned in plugins.specs(kind)}:
            # The entry that brings it may be the one that could not be read, which has a fault already.
            return OwnKeys.NOT_JUDGED
        return None if name is None else plugins.options_class(kind, name)

    try:
        return raw.structure(options_of), ()
    except KVFerryErrors as errors:
        return None, errors.errors


def _implementation_faults(raw: RawConfig, plugins: LoadedPlugins) -> list[KVFerryError]:
    """Gate 5 for everything that the configuration chose, each once and at the place of its choice."""
    faults: dict[tuple[str, str], KVFerryError] = {}
    for selection in raw.selections:
        kind, name = _KIND_OF[selection.spec], selection.use
        if name is None or (kind, name) in faults:
            continue
        try:
            plugins.check_implementation(kind, name)
        except KVFerryError as error:
            # A name that nobody provides is a fault of the configuration, and reported as one.
            if error.kind is ErrorKind.PLUGIN:
                faults[kind, name] = KVFerryError(
                    error.what,
                    kind=error.kind,
                    where=selection.origin,
                    why=error.why,
                    remedy=error.remedy,
                    retry=error.retry,
                )
    return list(faults.values())


def _ownerless(raw: RawConfig, selection: Selection, plugins: LoadedPlugins) -> OwnKeys:
    """A connector's keys without a connector: nothing to add when its plugin is one of the broken."""
    if not raw.plugins_readable or any(record.broken for record in plugins.records):
        return OwnKeys.NOT_JUDGED
    offered = sorted(set(plugins.offering("connector").values()))
    what = f"add {' or '.join(map(repr, offered))}" if offered else "list the connector's plugin"
    raise KVFerryError(
        f"these keys belong to a connector, and no listed plugin provides one: {', '.join(selection.keys)}",
        kind=ErrorKind.CONFIG,
        remedy=f"{what} under plugins, or remove the keys",
        retry=Retry.AFTER_CHANGE,
    )


def _only_connector(plugins: LoadedPlugins) -> str | None:
    names = [owned.spec.name for owned in plugins.specs("connector")]
    if len(names) > 1:
        raise KVFerryError(
            "several connectors are listed, so it is not clear whose section this is",
            kind=ErrorKind.CONFIG,
            remedy=f"set connector.use to one of: {', '.join(names)}",
            retry=Retry.AFTER_CHANGE,
        )
    return names[0] if names else None


def _spec_facts(plugins: LoadedPlugins, config: Config) -> dict[str, Fact]:
    """What the chosen specs claim, below the sections that chose them, and the known devices."""
    facts: dict[str, Fact] = {}
    for tier, section in config.tiers.items():
        origin = f"plugin {plugins.owned('backend', section.use).plugin.name}"
        claims = _claims(plugins.backend(section.use).capabilities, f"tiers.{tier}", origin)
        facts.update({fact.path: fact for fact in claims})
    if config.channel.use is not None:
        origin = f"plugin {plugins.owned('channel', config.channel.use).plugin.name}"
        claims = _claims(plugins.channel(config.channel.use).capabilities, "channel", origin)
        facts.update({fact.path: fact for fact in claims})
    for owned in plugins.specs("device"):
        path = f"devices.{owned.spec.name}.name"
        origin = f"plugin {owned.plugin.name}"
        facts[path] = Fact(path=path, value=owned.spec.name, origin=origin)
    if not any(record.broken for record in plugins.records):
        connectors = tuple(owned.spec.name for owned in plugins.specs("connector"))
        facts["listed.connectors"] = Fact(
            path="listed.connectors", value=connectors, origin="the listed plugins"
        )
    return facts


def _claims(
    capabilities: BackendCapabilities | ChannelCapabilities, section: str, origin: str
) -> Iterator[Fact]:
    """Each claim as a fact below the section that chose the spec."""
    for field in attrs.fields(type(capabilities)):
        value = getattr(capabilities, field.name)
        if isinstance(value, frozenset):
            value = tuple(sorted(str(each.value) for each in value))
        yield Fact(path=f"{section}.capabilities.{field.name}", value=value, origin=origin)


def waivers_of(config: Config) -> list[Waiver]:
    """The section ``waive`` with the place of each entry."""
    facts = config.facts()
    return [
        Waiver(rule_id=rule_id, reason=reason, origin=facts[f"waive.{rule_id}"].origin)
        for rule_id, reason in config.waive.items()
    ]
