"""The rules of host staging: well formed, and silent where no host staging is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.api import Fact, Rule, Truth
from kvferry.testing.conformance import RuleConformance
from kvferry_host_staging.rules import RULES


class TestStagingRules(RuleConformance):
    plugin = "host_staging"
    rule_prefix = "STG"


def facts_of(values: Mapping[str, Any]) -> Mapping[str, Fact]:
    return {path: Fact(path=path, value=value, origin="test") for path, value in values.items()}


@pytest.mark.parametrize("use", [None, "another"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_no_rule_applies_to_another_staging_or_to_none(rule: Rule, use: str | None) -> None:
    for example in rule.examples:
        facts = facts_of({**example.facts, "staging.use": use})
        assert rule.when.evaluate(facts) is Truth.FALSE


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_what_is_not_known_of_a_staging_is_no_pass(rule: Rule) -> None:
    """Of a file that is checked, core knows every key; of a claim that nobody made nothing follows."""
    required = set(rule.require.needs())
    (failing, *_) = (example for example in rule.examples if not example.passes)
    for path in required:
        facts = facts_of({name: value for name, value in failing.facts.items() if name != path})
        assert rule.require.evaluate(facts) is not Truth.TRUE
