"""``kvferry rules`` and ``kvferry rules explain``."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry.cli.host import Host
from kvferry.cli.layout import bullets, labelled, rows, wrapped
from kvferry.cli.output import add_format, print_json
from kvferry.cli.parser import mix_options
from kvferry.cli.sources import sources_of
from kvferry.compat import ExitCode, FactCatalogue, OwnedRule
from kvferry.compat.explanation import (
    Explanation,
    about_text,
    example_heading,
    explain,
    explanation_json,
    template_text,
)
from kvferry.config import read_core
from kvferry.plugins import LoadedPlugins, PluginRequest, PluginState, load_plugins
from kvferry.runtime.catalogue import catalogue_of
from kvferry.runtime.examination import fault_text
from kvferry.runtime.startup import requests_of
from kvferry.runtime.together import SCHEMA_VERSION

_EXPLAIN = "explain"
_ID = re.compile(r"[A-Za-z][A-Za-z0-9]*[0-9]{3,}")
_EPILOG = """\
  kvferry rules                          core's rules, and those of the plugins in KVFERRY_CONFIG
  kvferry rules c.yaml                   core's rules, and those of the plugins that c.yaml lists
  kvferry rules --plugin backend_cpu     core's rules, and those of this plugin
  kvferry rules explain CORE020          one rule with its reasons, facts and examples
"""


class RulesCommand:
    """Lists rules. Imports the plugins that were named or that the configuration lists."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = _EPILOG
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        mix_options(parser)
        parser.add_argument(
            "words",
            nargs="*",
            metavar="FILE | [explain] ID...",
            help="a configuration, or the ids of rules to explain",
        )
        # The name in front of the command has the destination 'plugin'.
        parser.add_argument(
            "--plugin",
            action="append",
            default=[],
            dest="rule_plugins",
            metavar="NAME",
            help="also the rules of this plugin; may be given several times",
        )
        add_format(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """0, or 2 for an unknown id and faults of the configuration, or 4 with a plugin that cannot be
        used."""
        words: list[str] = arguments.words
        if words and all(map(_names_a_rule, words)):
            words = [_EXPLAIN, *words]
        ids = words[1:] if words[:1] == [_EXPLAIN] else []
        file = self._file(words)
        plugins, faults = self._load(arguments.rule_plugins, file)
        catalogue = catalogue_of([plugins])
        chosen = plugins.rules()
        if ids:
            chosen = tuple(_find(rule_id, plugins) for rule_id in ids)
        if arguments.format == "json":
            explained = [explanation_json(explain(owned, catalogue)) for owned in chosen]
            print_json({"schema": SCHEMA_VERSION, "rules": explained})
        elif ids:
            texts = [self._explained(owned, catalogue, plugins.rules()) for owned in chosen]
            print("\n\n".join(texts))
        else:
            print("\n".join(rules_table(chosen, self._host.columns)))
        for fault in faults:
            print(wrapped(fault_text("error[config]", fault), self._host.columns), file=sys.stderr)
        for fault in plugins.faults():
            print(wrapped(fault_text("error[plugin]", fault), self._host.columns), file=sys.stderr)
        if plugins.faults():
            return int(ExitCode.BROKEN_PLUGIN)
        return int(ExitCode.ERRORS if faults else ExitCode.CLEAN)

    def _file(self, words: Sequence[str]) -> Path | None:
        if words[:1] == [_EXPLAIN]:
            if len(words) == 1:
                raise _usage(
                    "'kvferry rules explain' wants the id of a rule", "such as: kvferry rules explain CORE020"
                )
            return None
        if len(words) > 1:
            meant = [_EXPLAIN, *words[1:]] if all(map(_names_a_rule, words[1:])) else [_EXPLAIN, "ID"]
            raise _usage(
                "'kvferry rules' takes one file", f"to explain rules: kvferry rules {' '.join(meant)}"
            )
        return Path(words[0]) if words else None

    def _load(
        self, names: Sequence[str], file: Path | None
    ) -> tuple[LoadedPlugins, tuple[KVFerryError, ...]]:
        named = [PluginRequest.parse(name, origin="--plugin") for name in dict.fromkeys(names)]
        if named and file is None:
            return load_plugins(named, distributions=self._host.distributions), ()
        raw = read_core(sources_of(file, self._host))
        taken = {request.name for request in named}
        listed = [request for request in requests_of(raw) if request.name not in taken]
        return load_plugins([*named, *listed], distributions=self._host.distributions), raw.faults

    def _explained(self, owned: OwnedRule, catalogue: FactCatalogue, known: Sequence[OwnedRule]) -> str:
        return "\n".join(explanation_text(explain(owned, catalogue), known, self._host.columns))


def rules_table(rules: Sequence[OwnedRule], columns: int | None) -> list[str]:
    """One row for each rule; what must hold is broken below itself where the terminal is narrow."""
    head = ("ID", "SEVERITY", "OWNER", "SINCE", "MUST HOLD")
    shown = [
        (each.rule.id, each.rule.severity.value, each.owner, each.rule.since, str(each.rule.require))
        for each in rules
    ]
    return rows([head, *shown], columns)


def explanation_text(explanation: Explanation, known: Sequence[OwnedRule], columns: int | None) -> list[str]:
    """One rule for a reader: what it wants, why, what it looks at, and its examples."""
    owned, rule = explanation.owned, explanation.owned.rule
    by = f"{owned.owner} ({owned.distribution})" if owned.distribution else owned.owner
    texts = {each.rule.id: str(each.rule.require) for each in known}
    fields = [
        ("when", str(rule.when)),
        ("require", str(rule.require)),
        ("message", template_text(rule.message)),
        ("fix", template_text(rule.fix)),
        ("source", rule.source),
        *(("after", f"{each}: {texts.get(each, 'not loaded')}") for each in rule.requires),
    ]
    if not rule.waivable:
        fields.append(("waiver", "cannot be waived"))
    lines = labelled(
        f"{rule.severity.value}[{rule.id}] ", f"{about_text(owned)}; by {by}, since {rule.since}", columns
    )
    for label, text in fields:
        lines += labelled(f"  {label:<8} ", text, columns)
    if explanation.facts:
        lines += ["", "  facts that it reads"]
        table = [(fact.path, fact.text) for fact in explanation.facts]
        width = None if columns is None else columns - 4
        lines += bullets(rows(table, width), 4)
    for example in explanation.examples:
        lines += ["", f"  an example that {example_heading(example)}", *bullets(example.facts, 4)]
        if example.message:
            lines += labelled("    message  ", example.message, columns)
    return lines


def _find(rule_id: str, plugins: LoadedPlugins) -> OwnedRule:
    by_id = {owned.rule.id: owned for owned in plugins.rules()}
    found = by_id.get(rule_id.upper())
    if found is not None:
        return found
    near = difflib.get_close_matches(rule_id.upper(), sorted(by_id), 1)
    owners = ", ".join(dict.fromkeys(owned.owner for owned in by_id.values()))
    others = [record.name for record in plugins.records if record.state is PluginState.FOUND]
    why = f"known are {len(by_id)} rules of {owners}"
    if others:
        # Whose it is stands in the plugin itself, and none is imported that was not named.
        why += f"; installed and not asked: {', '.join(others)}"
    hint = f"did you mean {near[0]!r}? Otherwise: " if near else ""
    raise KVFerryError(
        f"there is no rule {rule_id!r}",
        kind=ErrorKind.CONFIG,
        why=why,
        remedy=f"{hint}{_command_with(rule_id.upper(), others)}",
        retry=Retry.AFTER_CHANGE,
    )


def _command_with(rule_id: str, others: Sequence[str]) -> str:
    """The command that knows the rules of those plugins too, first of all of the one whose name has the
    id's letters in it."""
    if not others:
        return (
            "'kvferry rules' lists all; rules of a plugin are known with --plugin NAME once it is installed"
        )
    letters = rule_id.rstrip("0123456789").lower()
    named = [name for name in others if letters and letters in name] or others
    options = " ".join(f"--plugin {name}" for name in named)
    return f"kvferry rules explain {rule_id} {options}"


def _names_a_rule(word: str) -> bool:
    """Whether a word looks like an id, and there is no such file."""
    return _ID.fullmatch(word) is not None and not Path(word).exists()


def _usage(what: str, remedy: str) -> KVFerryError:
    return KVFerryError(what, kind=ErrorKind.CONFIG, remedy=remedy, retry=Retry.AFTER_CHANGE)
