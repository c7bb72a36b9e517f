"""Everything that can be said about a rule without a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from kvferry.api import Example, Fact, FactKind, FactSource
from kvferry.compat.application import Subject, apply, read_paths
from kvferry.compat.catalogue import FactCatalogue, OwnedFactSpec
from kvferry.compat.findings import Finding, Outcome, OwnedRule
from kvferry.compat.rendering import plain
from kvferry.compat.values import PLACEHOLDER, size_text
from kvferry.compat.views import looked_at, plain_path

_GIVEN = {
    FactSource.CONFIGURATION: "from the configuration",
    FactSource.PLUGIN: "claimed by a plugin",
    FactSource.HOST: "from the host",
    FactSource.CORE: "worked out by core",
    FactSource.ENGINE: "from the engine",
    FactSource.PEER: "told between instances",
}
_MOST_TELLING_FIRST = (Outcome.VIOLATED, Outcome.UNVERIFIED, Outcome.OK, Outcome.NOT_APPLICABLE)


@frozen(kw_only=True)
class ExplainedFact:
    """A path that the rule reads, and what it means where a plugin says so."""

    path: str
    entry: OwnedFactSpec | None

    @property
    def text(self) -> str:
        """``size, from the host: memory of the machine``."""
        if self.entry is None:
            return "no loaded plugin says what it means"
        spec = self.entry.spec
        return f"{spec.kind.value}, {_GIVEN[spec.source]}: {spec.meaning}"


@frozen(kw_only=True)
class ExplainedExample:
    """An example with what the rule comes to; ``message`` and ``fix`` are filled when it fails."""

    example: Example
    outcome: Outcome
    message: str
    fix: str
    facts: tuple[str, ...]
    """``path = value``, as the rule's catalogue writes it."""


@frozen(kw_only=True)
class Explanation:
    """A rule, the facts that it reads, and its examples judged."""

    owned: OwnedRule
    facts: tuple[ExplainedFact, ...]
    examples: tuple[ExplainedExample, ...]


def explain(owned: OwnedRule, catalogue: FactCatalogue) -> Explanation:
    """Explain one rule by what ``catalogue`` knows of its facts."""
    paths = dict.fromkeys(plain for path in read_paths(owned) for plain in looked_at(path))
    return Explanation(
        owned=owned,
        facts=tuple(ExplainedFact(path=path, entry=catalogue.find(path)) for path in paths),
        examples=tuple(_example(owned, example, catalogue) for example in owned.rule.examples),
    )


def _example(owned: OwnedRule, example: Example, catalogue: FactCatalogue) -> ExplainedExample:
    facts = {path: Fact(path=path, value=value, origin="") for path, value in example.facts.items()}
    findings = list(apply(owned, Subject(facts=facts)))
    # Of several members one may be what the example is about, and the others only stand around it.
    telling = min(findings, key=lambda finding: _MOST_TELLING_FIRST.index(finding.outcome))
    failed = telling.outcome is Outcome.VIOLATED
    return ExplainedExample(
        example=example,
        outcome=telling.outcome,
        message=telling.message if failed else "",
        fix=telling.fix if failed else "",
        facts=tuple(_fact_text(fact, catalogue) for fact in facts.values()),
    )


def _fact_text(fact: Fact, catalogue: FactCatalogue) -> str:
    entry = catalogue.find(fact.path)
    kind = None if entry is None else entry.spec.kind
    return f"{fact.path} = {_value_text(fact.value, kind)}"


def _value_text(value: object, kind: FactKind | None) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and kind is FactKind.SIZE:
        return size_text(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return str(value) or '""'


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """The explanation as plain data."""
    owned, rule = explanation.owned, explanation.owned.rule
    return {
        "id": rule.id,
        "severity": rule.severity.value,
        "scope": rule.scope.value,
        "each": rule.each,
        "waivable": rule.waivable,
        "requires": list(rule.requires),
        "when": str(rule.when),
        "require": str(rule.require),
        "message": rule.message,
        "fix": rule.fix,
        "source": rule.source,
        "owner": owned.owner,
        "distribution": owned.distribution,
        "since": rule.since,
        "facts": [_fact_json(fact) for fact in explanation.facts],
        "examples": [
            {
                "passes": each.example.passes,
                "outcome": each.outcome.value,
                "facts": {path: plain(value) for path, value in each.example.facts.items()},
                "message": each.message,
            }
            for each in explanation.examples
        ],
    }


def _fact_json(fact: ExplainedFact) -> dict[str, Any]:
    spec = None if fact.entry is None else fact.entry.spec
    return {
        "path": fact.path,
        "kind": None if spec is None else spec.kind.value,
        "source": None if spec is None else spec.source.value,
        "meaning": None if spec is None else spec.meaning,
        "owner": None if fact.entry is None else fact.entry.owner,
    }


def example_heading(example: ExplainedExample) -> str:
    """``passes``, ``passes, because the rule does not apply``, or ``fails``."""
    if not example.example.passes:
        return "fails"
    applies = example.outcome is not Outcome.NOT_APPLICABLE
    return "passes" if applies else "passes, because the rule does not apply"


def about_text(finding_or_rule: Finding | OwnedRule) -> str:
    """What one application looks at, in words."""
    rule = finding_or_rule.rule
    if rule.each is not None:
        return f"about each of {rule.each}"
    return {
        "instance": "about one instance",
        "pair": "about every two instances on one host",
        "fleet": "about all instances on one host",
    }[rule.scope.value]


def template_text(template: str) -> str:
    """A rule's message or fix with its facts in braces, as a reader needs it: path and nothing else."""
    return PLACEHOLDER.sub(lambda match: f"{{{plain_path(match[1])}}}", template)
