"""Random edits of a document over four sources, against a model that knows winner, origin and fault."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.api import BackendSpec, ChannelSpec, ConnectorSpec, KVFerryErrors, LookupSpec, StagingSpec
from kvferry.config import (
    Config,
    ConfigSources,
    Duration,
    Selection,
    config_text,
    read_core,
)

from .documents import Document, document


@frozen(kw_only=True)
class TierOptions:
    flag: bool = False
    ratio: float = 0.5
    wait: Duration = field(default=Duration(1.0))
    names: tuple[str, ...] = ()


@frozen(kw_only=True)
class ConnectorOptions:
    level: int = 7
    note: str | None = None


@frozen(kw_only=True)
class ChannelOptions:
    lanes: int = 4
    peers: tuple[str, ...] = ("a",)


@frozen(kw_only=True)
class DirectoryOptions:
    url: str = "tcp://a:1"


@frozen(kw_only=True)
class StagingOptions:
    pinned: bool = False


def resolve(selection: Selection) -> type[Any] | None:
    return {
        BackendSpec: TierOptions,
        ConnectorSpec: ConnectorOptions,
        ChannelSpec: ChannelOptions,
        LookupSpec: DirectoryOptions,
        StagingSpec: StagingOptions,
    }.get(selection.spec)


FILE, ENV, OVERRIDE = "file", "env", "override"
SOURCES = (FILE, ENV, OVERRIDE)
"""Above the defaults, the weakest first."""
BAD = object()


@frozen(kw_only=True)
class Form:
    """One way of writing a value, and what it means without and within quotes."""

    text: str
    plain: Any
    quoted: Any = BAD
    in_quotes: bool = False
    outside: Any = None
    """What it means without quotes outside a file, if that is something else."""

    @property
    def written(self) -> str:
        return f"'{self.text}'" if self.in_quotes else self.text

    def meaning(self, source: str) -> Any:
        if self.in_quotes:
            return self.quoted
        return self.plain if source == FILE or self.outside is None else self.outside


def alike(text: str, value: Any) -> Form:
    return Form(text=text, plain=value, quoted=value)


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def mixed(good: st.SearchStrategy[Form], bad: st.SearchStrategy[Form]) -> st.SearchStrategy[Form]:
    """Mostly good ones, or no document would ever be read to its end."""
    return st.integers(0, 4).flatmap(lambda n: bad if n == 4 else good)


def bad(*texts: str) -> st.SearchStrategy[Form]:
    return st.sampled_from(texts).map(lambda text: Form(text=text, plain=BAD))


def text_in_quotes(*texts: str) -> st.SearchStrategy[Form]:
    """Texts that need quotes in a file. Elsewhere whatever stands alone can be text."""
    return st.sampled_from(texts).map(lambda text: Form(text=text, plain=BAD, quoted=text, outside=text))


def plain(**values: Any) -> st.SearchStrategy[Form]:
    return st.sampled_from([*values.items()]).map(lambda pair: Form(text=pair[0], plain=pair[1]))


FORMS: dict[str, st.SearchStrategy[Form]] = {
    "number": mixed(
        st.builds(
            lambda n, write: Form(text=write(n), plain=n),
            st.integers(1, 2**40),
            st.sampled_from([str, hex, "0o{:o}".format, "+{}".format]),
        ),
        bad("1_000", "0123", "1.5", "12:30", "1,024", "tcp://10.0.0.1:80", "[5]", "99999k"),
    ),
    "truth": mixed(
        plain(**{"true": True, "True": True, "false": False, "FALSE": False}),
        bad("no", "yes", "on", "off", "1", "0", "None"),
    ),
    "fraction": mixed(
        plain(**{"0.25": 0.25, "1": 1.0, "1e3": 1000.0, ".5": 0.5}), bad(".nan", ".inf", "50%", "x")
    ),
    "size": mixed(
        st.builds(
            lambda n, unit: alike(f"{n}{unit}", n * UNITS[unit]),
            st.integers(1, 2**20),
            st.sampled_from([*UNITS]),
        ),
        bad("16", "16gib", "-1GiB", "0x10GiB", "1_000GiB", "16G"),
    ),
    "time": mixed(
        st.sampled_from([("250ms", 0.25), ("2s", 2.0), ("1min", 60.0), ("1.5h", 5400.0)]).map(
            lambda pair: alike(*pair)
        ),
        bad("5", "5 minutes", "12:30", "-1s"),
    ),
    "text": mixed(
        st.sampled_from(["a", "no", "on", "12:30", "0123", "2024-01-01", "a b", "tcp://a:1"]).map(
            lambda text: alike(text, text)
        ),
        text_in_quotes("5", "true", "1.10"),
    ),
    "list": mixed(
        st.lists(st.sampled_from(["a", "b", "no"]), max_size=3).map(
            lambda items: Form(text=f"[{', '.join(items)}]", plain=tuple(items))
        ),
        bad("a", "tcp://a:1", "{a: b}", "[1]"),
    ),
}

KINDS: dict[str, str] = {
    "chunk_tokens": "number",
    "model_identity": "text",
    "tiers.cpu.capacity": "size",
    "tiers.cpu.flag": "truth",
    "tiers.cpu.ratio": "fraction",
    "tiers.cpu.wait": "time",
    "tiers.cpu.names": "list",
    "connector.level": "number",
    "connector.note": "text",
    "channel.lanes": "number",
    "channel.peers": "list",
    "lookup.url": "text",
    "staging.capacity": "size",
    "staging.pinned": "truth",
    "waive.CPU001": "text",
}
DEFAULTS = {
    "chunk_tokens": 256,
    "model_identity": None,
    "tiers.cpu.flag": False,
    "tiers.cpu.ratio": 0.5,
    "tiers.cpu.wait": 1.0,
    "tiers.cpu.names": (),
    "connector.level": 7,
    "connector.note": None,
    "channel.lanes": 4,
    "channel.peers": ("a",),
    "lookup.url": "tcp://a:1",
    "staging.capacity": 2**30,
    "staging.pinned": False,
}
FREE = {"tiers.cpu", "waive.CPU001"}
"""Names that are the user's own, so that a slip in them is another name and no fault of this kind."""
FIXED = {"tiers.cpu.use": "cpu"}
"""Always in the file: without it nothing could be said about the tier's own keys."""


@frozen(kw_only=True)
class Misspelt:
    """A path with one slip: the path up to it, and the whole."""

    upto: str
    path: str


@st.composite
def slips(draw: st.DrawFn) -> Misspelt:
    path = draw(st.sampled_from([*KINDS]))
    parts = path.split(".")
    ends = [end for end in range(1, len(parts) + 1) if ".".join(parts[:end]) not in FREE]
    at = draw(st.sampled_from(ends)) - 1
    wrong = [*parts[:at], parts[at] + draw(st.sampled_from(["s", "x", "0"])), *parts[at + 1 :]]
    return Misspelt(upto=".".join(wrong[: at + 1]), path=".".join(wrong))


class ConfigurationMachine(RuleBasedStateMachine):
    """Edits sources, and after each edit compares what is read with what the model says."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._file = Path(self._folder.name) / "config.yaml"
        self._sources: dict[str, dict[str, Form]] = {source: {} for source in SOURCES}
        self._slips: dict[str, str] = {}
        self._sources[FILE]["tiers.cpu.capacity"] = alike("1GiB", 2**30)

    def teardown(self) -> None:
        self._folder.cleanup()

    @rule(
        source=st.sampled_from(SOURCES),
        chosen=st.sampled_from([*KINDS]).flatmap(lambda p: st.tuples(st.just(p), FORMS[KINDS[p]])),
    )
    def set(self, source: str, chosen: tuple[str, Form]) -> None:
        path, form = chosen
        self._sources[source][path] = form

    @precondition(lambda self: any(self._sources.values()))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        source, path = self._pick(data)
        del self._sources[source][path]

    @precondition(lambda self: any(self._sources.values()))
    @rule(data=st.data())
    def quote(self, data: st.DataObject) -> None:
        source, path = self._pick(data)
        form = self._sources[source][path]
        self._sources[source][path] = evolve(form, in_quotes=not form.in_quotes)

    @precondition(lambda self: any(self._sized()))
    @rule(data=st.data(), unit=st.sampled_from([*UNITS, ""]))
    def change_unit(self, data: st.DataObject, unit: str) -> None:
        source = data.draw(st.sampled_from(sorted(self._sized())))
        form = self._sources[source]["tiers.cpu.capacity"]
        number = form.text.rstrip("BKMGik")
        changed = alike(f"{number}{unit}", int(number) * UNITS[unit] if unit else BAD)
        self._sources[source]["tiers.cpu.capacity"] = evolve(changed, in_quotes=form.in_quotes)

    @rule(source=st.sampled_from(SOURCES), slip=slips(), form=FORMS["number"])
    def misspell(self, source: str, slip: Misspelt, form: Form) -> None:
        self._slips[slip.path] = slip.upto
        self._sources[source][slip.path] = form

    @precondition(lambda self: any(self._sources.values()))
    @rule()
    def mend(self) -> None:
        """What an operator does with a report: everything in it goes."""
        for source, forms in self._sources.items():
            for path, form in [*forms.items()]:
                if path in self._slips or form.meaning(source) is BAD:
                    del forms[path]
        if self._winner("tiers.cpu.capacity") is None:
            self._sources[FILE]["tiers.cpu.capacity"] = alike("1GiB", 2**30)

    @invariant()
    def read_and_compare(self) -> None:
        written = self._write()
        sources = ConfigSources(
            file=self._file,
            environment={_variable(path): f.written for path, f in self._sources[ENV].items()},
            overrides={f"kvferry.{path}": f.written for path, f in self._sources[OVERRIDE].items()},
        )
        # A variable carries no letter case, so neither does the path that its fault names.
        expected = sorted((where, path.lower()) for where, path in self._faults(written))
        try:
            config = read_core(sources).structure(resolve)
        except KVFerryErrors as errors:
            found = sorted((error.where, error.what.partition(": ")[0].lower()) for error in errors.errors)
            assert found == expected
            return
        assert expected == []
        leaves = {".".join(leaf.path): leaf for leaf in config.leaves}
        for path in KINDS:
            source = self._winner(path)
            if source is not None:
                meaning = self._sources[source][path].meaning(source)
                assert leaves[path].value == meaning
                assert type(leaves[path].value) is type(meaning)
                assert leaves[path].origin == self._place(source, path, written.values)
            elif path in DEFAULTS:
                assert (leaves[path].value, leaves[path].origin) == (DEFAULTS[path], "default")
            else:
                assert path not in leaves
        self._show_and_read_again(config)

    def _show_and_read_again(self, config: Config) -> None:
        """What ``kvferry config show`` prints, written down as a file, means the same."""
        shown = {}
        for line in config_text(config).splitlines():
            path, rest = line.split(None, 1)
            value, _, _ = rest.rpartition("  ")
            shown[path] = value.strip()
        self._file.write_text(document(shown).text, encoding="utf-8")
        again = read_core(ConfigSources(file=self._file, environment={}, overrides={})).structure(resolve)
        assert again == config
        assert [(leaf.path, leaf.value) for leaf in again.leaves] == [
            (leaf.path, leaf.value) for leaf in config.leaves
        ]

    # The model.

    def _pick(self, data: st.DataObject) -> tuple[str, str]:
        every = [(source, path) for source in SOURCES for path in sorted(self._sources[source])]
        return data.draw(st.sampled_from(every))

    def _sized(self) -> Iterator[str]:
        for source in SOURCES:
            form = self._sources[source].get("tiers.cpu.capacity")
            if form is not None and form.text.rstrip("BKMGik").isdecimal():
                yield source

    def _write(self) -> Document:
        made = document({**FIXED, **{path: form.written for path, form in self._sources[FILE].items()}})
        self._file.write_text(made.text, encoding="utf-8")
        return made

    def _winner(self, path: str) -> str | None:
        return next((source for source in reversed(SOURCES) if path in self._sources[source]), None)

    def _place(self, source: str, path: str, places: Mapping[str, str]) -> str:
        where: dict[str, Callable[[], str]] = {
            FILE: lambda: f"{self._file}:{places[path]}",
            ENV: lambda: f"env {_variable(path)}",
            OVERRIDE: lambda: "kv_connector_extra_config",
        }
        return where[source]()

    def _faults(self, written: Document) -> Iterator[tuple[str, str]]:
        """Place and path of every fault."""
        for path in KINDS:
            source = self._winner(path)
            if source is not None and self._sources[source][path].meaning(source) is BAD:
                bad = self._sources[source][path]
                yield from self._bad_value(source, path, bad, written)
        if self._winner("tiers.cpu.capacity") is None:
            yield f"{self._file}:{written.keys['tiers.cpu']}", "tiers.cpu"
        yield from self._unknown_keys(written)

    def _bad_value(self, source: str, path: str, form: Form, written: Document) -> Iterator[tuple[str, str]]:
        place = self._place(source, path, written.values)
        # An item of a list is a place of its own in a file.
        if form.written == "[1]" and KINDS[path] == "list":
            if source == FILE:
                line, _, column = written.values[path].partition(":")
                place = f"{self._file}:{line}:{int(column) + 1}"
            yield place, f"{path}.0"
        else:
            yield place, path

    def _unknown_keys(self, written: Document) -> Iterator[tuple[str, str]]:
        for upto in sorted(set(self._slips.values())):
            holding = {
                source: path
                for source in SOURCES
                for path in sorted(self._sources[source])
                if self._slips.get(path) == upto
            }
            if not holding:
                continue
            # Sections join, so the first one stands for all; of values the strongest is left.
            leaf = upto in self._slips and self._slips[upto] == upto
            source = [*holding][-1 if leaf else 0]
            if source == ENV and not leaf:
                first = min(path for path in self._sources[ENV] if self._slips.get(path) == upto)
                yield self._place(ENV, first, written.keys), upto
            else:
                yield self._place(source, upto, written.keys), upto


def _variable(path: str) -> str:
    return "KVFERRY__" + path.upper().replace(".", "__")


TestConfigurationMachine = ConfigurationMachine.TestCase
TestConfigurationMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
