"""The reference page of compatibility rules and the facts that they read."""

from __future__ import annotations

from kvferry.api import FactSource, FactSpec
from kvferry.cli.markdown import block, code, page, table
from kvferry.compat import FactCatalogue, OwnedRule
from kvferry.compat.explanation import (
    ExplainedExample,
    Explanation,
    about_text,
    example_heading,
    explain,
    template_text,
)
from kvferry.plugins import LoadedPlugins
from kvferry.runtime.catalogue import catalogue_of

_INTRO = """\
`kvferry check FILE...` judges configurations by these rules before anything starts, and an engine's start
judges by the same ones. `kvferry rules explain ID` prints what stands here, for plugins of others too.

- An **error** that is violated stops the start, and so does an error that could not be verified: a fact that
  is missing is not a pass. A **warning** counts with `--strict`. A **note** never does.
- A rule is judged when its condition is true. It is not judged while a rule that it comes after is in
  trouble.
- A waiver lifts a rule for a reason, in the configuration: `waive: {CORE023: "host memory for sure"}`. What
  it lifts stays in the report.
- Several files are judged one by one and then as neighbours on one host: `kvferry check a.yaml b.yaml`.
  Rules about two instances call their facts `one.` and `other.`, rules about all of them `instances.*.`; a
  waiver in any of the files that a finding names lifts it.
- Another machine is judged by a file of its facts: there `kvferry doctor --format facts > there.yaml`, here
  `kvferry check --facts there.yaml FILE`. Nothing that this machine is or has then counts, nor do variables
  that begin with `KVFERRY__`, unless `--with-environment` is given. A rule about the engine is judged as soon
  as what it asks of the engine is known."""

_GIVEN_BY = {
    FactSource.HOST: "the host",
    FactSource.ENGINE: "the engine",
    FactSource.PLUGIN: "a plugin's claim",
    FactSource.CONFIGURATION: "the configuration",
    FactSource.CORE: "core",
    FactSource.PEER: "the instances' hello",
}


def rules_page(plugins: LoadedPlugins) -> str:
    """All rules of core and of the loaded plugins, and the catalogue of facts."""
    catalogue = catalogue_of([plugins])
    rules = plugins.rules()
    lines = [*_INTRO.splitlines(), "", "## All rules", ""]
    lines += table(("id", "severity", "about", "must hold"), [_overview(owned) for owned in rules])
    owner = ""
    for owned in rules:
        if owned.owner != owner:
            owner = owned.owner
            lines += ["## Rules of core" if owner == "core" else f"## Rules of plugin `{owner}`", ""]
        lines += _rule_lines(explain(owned, catalogue))
    return page("Compatibility rules", [*lines, *_fact_lines(catalogue)])


def _overview(owned: OwnedRule) -> tuple[str, str, str, str]:
    rule = owned.rule
    link = f"[{rule.id}](#{rule.id.lower()})"
    return (link, rule.severity.value, about_text(owned).removeprefix("about "), code(str(rule.require)))


def _rule_lines(explanation: Explanation) -> list[str]:
    owned, rule = explanation.owned, explanation.owned.rule
    marks = [f"**{rule.severity.value}**", about_text(owned), f"since {rule.since}"]
    if not rule.waivable:
        marks.append("cannot be waived")
    after = ", ".join(f"[{each}](#{each.lower()})" for each in rule.requires)
    lines = [f"### {rule.id}", "", " · ".join(marks), ""]
    lines += [
        f"- When: {code(str(rule.when))}",
        f"- Must hold: {code(str(rule.require))}",
        f"- Says: {_escaped(template_text(rule.message))}",
        f"- Fix: {_escaped(template_text(rule.fix))}",
        f"- Source: {rule.source}",
        *([f"- Comes after: {after}"] if after else []),
        "",
    ]
    reads = [
        (code(fact.path), "", "", fact.text)
        if fact.entry is None
        else (
            code(fact.path),
            fact.entry.spec.kind.value,
            _GIVEN_BY[fact.entry.spec.source],
            fact.entry.spec.meaning,
        )
        for fact in explanation.facts
    ]
    lines += table(("fact", "type", "given by", "meaning"), reads)
    for example in explanation.examples:
        lines += block("text", _example_lines(example))
    return lines


def _example_lines(example: ExplainedExample) -> list[str]:
    heading = f"# {example_heading(example)}"
    if example.message:
        heading = f"{heading}: {example.message}"
    return [heading, *example.facts]


def _escaped(text: str) -> str:
    return text.replace("*", "\\*")


def _type_text(spec: FactSpec) -> str:
    """``whole number, at least 1``."""
    return spec.kind.value if spec.at_least is None else f"{spec.kind.value}, at least {spec.at_least:g}"


def _fact_lines(catalogue: FactCatalogue) -> list[str]:
    lines = [
        "## Facts",
        "",
        "What rules can read besides the [keys of the configuration](configuration.md). A file for `--facts`",
        "may give those of the host and of the engine; sizes and durations are written with their unit.",
        "",
    ]
    rows = [
        (
            code(entry.spec.path),
            _type_text(entry.spec),
            _GIVEN_BY[entry.spec.source],
            entry.owner,
            entry.spec.meaning,
        )
        for entry in catalogue.entries
        if entry.spec.source is not FactSource.CONFIGURATION
    ]
    return lines + table(("fact", "type", "given by", "described by", "meaning"), rows)
