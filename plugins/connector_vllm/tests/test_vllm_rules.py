"""The connector's rules hold what their own examples say."""

from __future__ import annotations

import pytest

from kvferry.api import Rule
from kvferry.testing.rules import rule_faults, run_examples
from kvferry_connector_vllm.plugin import MANIFEST, kvferry_rules

RULES = list(kvferry_rules())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_examples_give_what_they_promise(rule: Rule) -> None:
    assert {example.passes for example in rule.examples} == {True, False}
    assert not list(run_examples(rule))


def test_rules_are_well_formed() -> None:
    assert not list(rule_faults(RULES, MANIFEST.rule_prefix))
