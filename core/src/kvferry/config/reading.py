"""The two passes: first what core understands, then, once plugins are known, the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from attrs import evolve, field, fields, frozen

from kvferry.api import ErrorKind, KVFerryError, KVFerryErrors
from kvferry.config.fields import Role, role
from kvferry.config.leaves import leaves_of
from kvferry.config.merging import merged
from kvferry.config.nodes import (
    DEFAULT,
    ConfigPath,
    Fault,
    Node,
    Place,
    Source,
    in_order,
    locate,
    printable,
)
from kvferry.config.schema import TEXT_KINDS, Config, PluginEntry, Reason, RuleId
from kvferry.config.sections import Resolver, Sections, Selection
from kvferry.config.shorthand import expanded
from kvferry.config.sources import ConfigSources, environment_tree, file_tree, override_tree
from kvferry.config.structure import Rejected, Structurer
from kvferry.config.variables import near_misses


@frozen(kw_only=True)
class RawConfig:
    """What the first pass found. Plugins' own keys are still raw.

    ``faults`` are all faults so far; reading goes on as if they were not there, and
    :meth:`structure` reports them together with its own.
    """

    name: str
    """What the configuration is called in messages: its file, or ``configuration``."""
    plugins: tuple[PluginEntry, ...]
    """The entries that could be read, in their order."""
    plugins_readable: bool
    """False where ``plugins`` or one of its entries could not be read: then more are wanted than
    ``plugins`` says, and it is not known which."""
    selections: tuple[Selection, ...]
    """The sections that name a plugin's spec, with the name."""
    waivers: tuple[tuple[str, str, str], ...]
    """Rule, reason and place of every waiver that could be read."""
    faults: tuple[KVFerryError, ...]
    _root: Node = field(repr=False)
    _unread: tuple[Fault, ...] = field(repr=False)
    _readable: bool = field(repr=False)

    def structure(self, resolve: Resolver, faults: Iterable[KVFerryError] = ()) -> Config:
        """The whole configuration, with the options of every selected plugin.

        ``resolve`` is called once for every selection. ``faults`` are the caller's own, for example
        of plugins that could not be loaded. Raises :class:`kvferry.api.KVFerryErrors` with all
        faults of both passes and the caller's, source by source and from top to bottom.
        """
        if not self._readable:
            # Which plugins are wanted is unknown, so complaints about them would mislead.
            raise self._errors((*self.faults, *faults))
        sections = Sections(resolve)
        structurer = Structurer(TEXT_KINDS, sections)
        config: Config | None = None
        with suppress(Rejected):
            config = structurer.structure(self._root, Config)
        found = (*self._unread, *structurer.faults, *sections.placement.faults())
        errors = (*in_order(found), *faults)
        if errors or config is None:
            raise self._errors(errors)
        return evolve(config, leaves=tuple(leaves_of(config, self._root)))

    def origin(self, path: ConfigPath) -> str:
        """Where the value at ``path`` stands, such as ``config.yaml:12:5``; ``default`` if nowhere."""
        node: Node | None = self._root
        for key in path:
            if node is not None and isinstance(node.value, tuple):
                index = int(key)
                node = node.value[index] if index < len(node.value) else None
            elif node is not None:
                node = node.find(key)
        return str(DEFAULT if node is None else node.place)

    def _errors(self, errors: tuple[KVFerryError, ...]) -> KVFerryErrors:
        count = "1 fault" if len(errors) == 1 else f"{len(errors)} faults"
        return KVFerryErrors(f"{self.name}: {count}", errors, kind=ErrorKind.CONFIG)


def read_core(sources: ConfigSources) -> RawConfig:
    """Read and merge all sources, and structure what core understands.

    Raises nothing for a bad configuration: faults are collected in the result.
    """
    faults: list[Fault] = []
    base: Node | None = Node({}, Place(Source.DEFAULT), Place(Source.DEFAULT))
    if sources.file is not None:
        base, faults = file_tree(sources.file, sources.content)
    readable = base is not None
    if base is None:
        base = Node({}, DEFAULT, DEFAULT, complete=False)
    root = expanded(base)
    for tree, found in (
        environment_tree(sources.environment, complete=readable),
        override_tree(sources.overrides, complete=readable),
    ):
        root = merged(root, expanded(tree), faults)
        faults += found
    keys = [item.name for item in fields(Config) if role(item) is Role.KEY]
    faults += near_misses(sources.environment, keys)
    root = locate(root)

    sections = Sections(None)
    structurer = Structurer(TEXT_KINDS, sections)
    with suppress(Rejected):
        structurer.structure(root, Config)
    plugins, all_read = _plugins(root)
    return RawConfig(
        name="configuration" if sources.file is None else printable(str(sources.file)),
        plugins=plugins,
        plugins_readable=all_read,
        selections=tuple(sections.selections) if readable else (),
        waivers=tuple(_waivers(root)),
        faults=in_order((*faults, *structurer.faults, *sections.placement.faults())),
        root=root,
        unread=tuple(faults),
        readable=readable,
    )


def _waivers(root: Node) -> Iterator[tuple[str, str, str]]:
    """Every waiver that can be read, whatever is wrong with the others."""
    node = root.find("waive")
    items = node.value if node is not None and isinstance(node.value, dict) else {}
    for rule, item in items.items():
        one = evolve(item, value={rule: item})
        with suppress(Rejected):
            read = Structurer(TEXT_KINDS, Sections(None)).structure(one, Mapping[RuleId, Reason])
            for rule_id, reason in read.items():
                yield rule_id, reason, str(item.place)


def _plugins(root: Node) -> tuple[tuple[PluginEntry, ...], bool]:
    """Every entry that can be read, whatever is wrong with the others, and whether that is all."""
    node = root.find("plugins")
    if node is None:
        return (), True
    items = node.value if isinstance(node.value, tuple) else ()
    entries = []
    for item in items:
        try:
            entries.append(Structurer(TEXT_KINDS, Sections(None)).structure(item, PluginEntry))
        except Rejected:
            continue
    return tuple(entries), isinstance(node.value, tuple) and len(entries) == len(items)
