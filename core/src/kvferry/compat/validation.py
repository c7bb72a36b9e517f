"""Faults of a plugin's rules that can be seen before any rule is applied."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvferry.api import Expression, Rule, Severity
from kvferry.compat.values import placeholders

RULE_PREFIX = re.compile(r"[A-Z][A-Z0-9]*(?<![0-9])")
"""Ends in a letter, so that prefix and number of an id can always be told apart."""
_NUMBER = re.compile(r"[0-9]{3,}")


def rule_faults(rules: Iterable[Rule], prefix: str) -> tuple[str, ...]:
    """One sentence per fault: an id outside ``prefix``, an id used twice, a field of a wrong type, a
    message that names a fact the rule does not read, no example for one of the two verdicts."""
    faults: list[str] = []
    seen: set[str] = set()
    for rule in rules:
        faults += _identity_faults(rule, prefix)
        if rule.id in seen:
            faults.append(f"rule {rule.id} is given twice")
        seen.add(rule.id)
        faults += _content_faults(rule)
    return tuple(faults)


def _identity_faults(rule: Rule, prefix: str) -> list[str]:
    rule_id = rule.id
    if not isinstance(rule_id, str) or not rule_id.startswith(prefix):
        return [f"rule {rule_id!r} does not begin with the plugin's prefix {prefix!r}"]
    if not _NUMBER.fullmatch(rule_id[len(prefix) :]):
        return [f"rule {rule_id!r} is not {prefix!r} followed by three or more digits"]
    return []


def _content_faults(rule: Rule) -> list[str]:
    name = f"rule {rule.id}"
    if not isinstance(rule.severity, Severity):
        return [f"{name} has the severity {rule.severity!r}, not a kvferry.api.Severity"]
    if not (isinstance(rule.when, Expression) and isinstance(rule.require, Expression)):
        return [f"{name} needs kvferry.api expressions as when and require"]
    faults = []
    reads = {*rule.when.reads(), *rule.require.reads()}
    for text in (rule.message, rule.fix):
        faults += [
            f"{name} names the fact {path!r} in its text and does not read it"
            for path, _ in placeholders(text)
            if path not in reads
        ]
    verdicts = {example.passes for example in rule.examples}
    if verdicts != {True, False}:
        faults.append(f"{name} needs one passing and one failing example at least")
    return faults
