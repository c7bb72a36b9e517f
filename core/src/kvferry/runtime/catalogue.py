"""The catalogue of facts for a set of plugins, and the keys that their configuration may hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

from kvferry.api import KVFerryError
from kvferry.compat import FactCatalogue, OwnedFactSpec
from kvferry.compat.keys import ConfigKey, core_keys, option_keys, option_sections
from kvferry.plugins import BUILTIN_NAME, LoadedPlugins, OwnedSpec
from kvferry.plugins.descriptions import SPEC_HOOKS


@frozen(kw_only=True)
class OwnedKeys:
    """The own keys of one spec."""

    owned: OwnedSpec
    section: str
    keys: tuple[ConfigKey, ...]


def own_keys(plugins: LoadedPlugins) -> Iterator[OwnedKeys]:
    """Specs whose section a configuration can hold, with the keys of their options class.

    Imports the options classes. Raises :class:`KVFerryError` when one of them is broken.
    """
    sections = option_sections()
    for kind, _, spec_type in SPEC_HOOKS:
        section = sections.get(spec_type)
        for owned in plugins.specs(kind) if section is not None else ():
            options = plugins.options_class(kind, owned.spec.name)
            keys = () if options is None else option_keys(options, section or "")
            yield OwnedKeys(owned=owned, section=section or "", keys=keys)


def catalogue_of(loaded: Sequence[LoadedPlugins]) -> FactCatalogue:
    """Every fact that core or one of the plugins knows. A plugin whose options class is broken, which
    is told elsewhere, loses only the keys in it."""
    entries: list[OwnedFactSpec] = []
    for plugins in loaded:
        entries += plugins.fact_specs()
    entries += [OwnedFactSpec(spec=key.as_fact(), owner=BUILTIN_NAME) for key in core_keys()]
    for plugins in loaded:
        try:
            entries += [
                OwnedFactSpec(spec=key.as_fact(), owner=each.owned.plugin.name)
                for each in own_keys(plugins)
                for key in each.keys
            ]
        except KVFerryError:
            continue
    return FactCatalogue(entries)
