"""The reference page of configuration keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.cli.markdown import code, page, table
from kvferry.compat.keys import ConfigKey, core_keys
from kvferry.plugins import BUILTIN_NAME, LoadedPlugins
from kvferry.runtime.catalogue import OwnedKeys, own_keys

_INTRO = """\
One YAML file configures one instance. Whatever stands in it is read strictly: a key that is not on this page,
a value of another type, a size without a unit and a key that is given twice are errors with file, line and
column.

Later sources win: the defaults below, the file, environment variables, then `kvferry.*` keys of the engine's
`kv_connector_extra_config` (`"kvferry.tiers.cpu.capacity": "8GiB"`). `kvferry config show FILE` prints what
came out, with the origin of every value.

A `*` in a key stands for a name that you give, such as a tier's, or for each item of a list; in a variable it
is `<NAME>`. A mapping given by a variable is merged with the file's, key by key; a list replaces the file's.
Items of lists have no variables of their own: a variable gives the whole list, as
`KVFERRY__PLUGINS='[backend_cpu]'` does. Names with a `-`, such as a cache salt, stand in a variable's value
and not in its name: `KVFERRY__TIERS__CPU__EVICTION__QUOTAS='{tenant-a: 1GiB}'`."""

_SPELLINGS = (
    (
        "size",
        "`16GiB`, `512MiB` (1024-based), `16GB` (1000-based), `0B`",
        "`16`, `16g`: a size needs its unit",
    ),
    ("size or unlimited", "a size, or `unlimited`", "`-1`"),
    ("duration", "`250ms`, `30s`, `5min`, `2h`", "`30`: a duration needs its unit"),
    ("whole number", "`256`, `0x100`", '`"256"`, `1e3`, `2.0`'),
    ("number", "`0.8`, `1`, `1e-3`", '`"0.8"`, `.nan`, `.inf`'),
    ("true or false", "`true`, `false`", '`yes`, `no`, `on`, `"true"`'),
    (
        "text",
        '`kvferry`, `"kvferry"`',
        "`no`-like words are text; `256` needs quotes in a file, not in a variable",
    ),
    ("one of", "one of the words, as given", "other letter case"),
    ("list of", "`[a, b]`, or one `- item` a line", "`a`: write a list of one, `[a]`"),
    ("tier name", "`cpu`, `ssd_2`", "upper case, dots"),
    ("rule id", "`CORE020`, `core020`", ""),
    ("reason", "text with something to read in it", "nothing"),
)
_SHORT = (
    ("`plugins: [backend_cpu]`", "`plugins: [{name: backend_cpu}]`"),
    ("`plugins: [backend_cpu@acme-cpu]`", "`plugins: [{name: backend_cpu, distribution: acme-cpu}]`"),
    ("`eviction: lru`", "`eviction: {use: lru}`"),
)


def configuration_page(plugins: LoadedPlugins) -> str:
    """All keys of core and of the loaded plugins. Raises :class:`kvferry.api.KVFerryError` when an
    options class is broken."""
    keys = core_keys()
    used = {key.type for key in keys}
    own = list(own_keys(plugins))
    used |= {key.type for each in own for key in each.keys}
    lines = [*_INTRO.splitlines(), "", "## How values are written", ""]
    lines += table(
        ("type", "is written", "is refused or means something else"),
        [row for row in _SPELLINGS if any(row[0] in text for text in used)],
    )
    lines += ["Short spellings:", "", *table(("short", "long"), _SHORT), "## Keys of core", ""]
    lines += _core_lines(keys)
    lines += _spec_lines(each for each in own if each.owned.plugin.name == BUILTIN_NAME)
    for record in plugins.records:
        if record.name == BUILTIN_NAME or record.manifest is None:
            continue
        lines += [f"## Plugin `{record.name}`", "", f"{_sentence(record.manifest.summary)}", ""]
        mine = [each for each in own if each.owned.plugin.name == record.name]
        lines += _spec_lines(mine) or ["No keys of its own.", ""]
    return page("Configuration", lines)


def _core_lines(keys: Sequence[ConfigKey]) -> list[str]:
    by_section: dict[str, list[ConfigKey]] = {}
    for key in keys:
        by_section.setdefault(key.path.rpartition(".")[0], []).append(key)
    lines = []
    for section, inside in by_section.items():
        lines += [f"### {code(section) if section else 'At the top'}", "", *_key_table(inside)]
    return lines


def _spec_lines(specs: Iterable[OwnedKeys]) -> list[str]:
    lines = []
    for each in specs:
        spec = each.owned.spec
        lines += [f"### {each.owned.kind} `{spec.name}`, in `{each.section}` with `use: {spec.name}`", ""]
        lines += [_sentence(spec.summary), ""] if spec.summary else []
        lines += _key_table(each.keys) or ["No keys of its own.", ""]
    return lines


def _key_table(keys: Sequence[ConfigKey]) -> list[str]:
    head = ("key", "type", "default", "environment variable", "meaning")
    return table(head, [_row(key) for key in keys])


def _row(key: ConfigKey) -> tuple[str, str, str, str, str]:
    default = "must be set" if key.default is None else key.default
    words = default in ("must be set", "not set")
    type_text = ", ".join(map(code, key.choices)) if key.choices else key.type
    doc = f"{key.doc} (secret: never shown)" if key.secret else key.doc
    return (code(key.path), type_text, default if words else code(default), code(key.variable), doc)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
