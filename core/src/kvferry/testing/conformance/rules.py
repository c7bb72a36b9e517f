"""What every set of compatibility rules promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from kvferry.api import Rule
from kvferry.compat import rule_faults, run_examples
from kvferry.compat.values import placeholders
from kvferry.plugins import LoadedPlugins
from kvferry.testing.conformance.base import Conformance
from kvferry.testing.conformance.subject import load_plugin


class RuleConformance(Conformance, kit=True):
    """For the rules of the plugin named ``plugin``, which must be installed."""

    plugin: ClassVar[str]
    rule_prefix: ClassVar[str]
    """As the manifest gives it."""

    @pytest.fixture
    def plugins(self) -> LoadedPlugins:
        """The plugin, loaded as core does it."""
        return load_plugin(self.plugin)

    @pytest.fixture
    def rules(self, plugins: LoadedPlugins) -> Sequence[Rule]:
        """All rules of the plugin."""
        return [owned.rule for owned in plugins.rules() if owned.owner == self.plugin]

    def test_there_are_rules(self, rules: Sequence[Rule]) -> None:
        """A suite over no rules would prove nothing."""
        assert rules, f"{self.plugin!r} has no rules"

    def test_every_rule_is_well_formed(self, rules: Sequence[Rule]) -> None:
        """Ids bear the prefix and are unique, texts name only facts that are read, and no rules
        require each other in a circle."""
        assert rule_faults(rules, self.rule_prefix) == ()

    def test_every_example_comes_out_as_it_says(self, rules: Sequence[Rule]) -> None:
        """A rule judges its own examples right, and its message has no gaps."""
        assert [problem for rule in rules for problem in run_examples(rule)] == []

    def test_every_rule_says_where_it_comes_from(self, rules: Sequence[Rule]) -> None:
        """A reader can look up why the rule is there."""
        assert [rule.id for rule in rules if not rule.source.strip()] == []

    def test_texts_are_one_sentence_and_a_remedy(self, rules: Sequence[Rule]) -> None:
        """Message and fix read well in a report: there, on one line, without a trailing full stop, and
        with every brace closed around the name of a fact."""
        for rule in rules:
            for text in (rule.message, rule.fix):
                assert text == text.strip(), f"{rule.id} has blanks around {text!r}"
                assert text, f"{rule.id} has an empty text"
                assert "\n" not in text, f"{rule.id} has a text of several lines"
                assert not text.endswith("."), f"{rule.id} ends {text!r} with a full stop"
                bare = text
                for path, form in placeholders(text):
                    bare = bare.replace(f"{{{path}:{form}}}" if form else f"{{{path}}}", "")
                assert "{}" not in text, f"{rule.id} names no fact in {text!r}"
                assert "}" not in bare or "{" in bare, f"{rule.id} has a lone brace in {text!r}"
