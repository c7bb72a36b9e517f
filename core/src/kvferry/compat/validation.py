"""Faults of a plugin's rules that can be seen before any rule is applied."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

from kvferry.api import Expression, Rule, Scope, Severity
from kvferry.compat.core_rules import core_rules
from kvferry.compat.dependencies import cycles
from kvferry.compat.values import placeholders
from kvferry.compat.views import INSTANCES, PAIR_WORDS

RULE_PREFIX = re.compile(r"[A-Z][A-Z0-9]*(?<![0-9])")
"""Ends in a letter, so that prefix and number of an id can always be told apart."""
_NUMBER = re.compile(r"[0-9]{3,}")


def rule_faults(rules: Iterable[Rule], prefix: str) -> tuple[str, ...]:
    """One sentence per fault: an id outside ``prefix``, an id used twice, a field of a wrong type, a
    message that names a fact the rule does not read, no example for one of the two verdicts, a
    required rule that is not there, rules that require each other in a circle.

    ``rules`` are all rules of one plugin. They may require each other and core's: whether another
    plugin is listed is not theirs to say.
    """
    faults: list[str] = []
    seen: set[str] = set()
    rules = tuple(rules)
    for rule in rules:
        faults += _identity_faults(rule, prefix)
        if rule.id in seen:
            faults.append(f"rule {rule.id} is given twice")
        seen.add(rule.id)
        faults += _content_faults(rule)
    return (*faults, *_requirement_faults(rules))


def _requirement_faults(rules: Sequence[Rule]) -> Iterator[str]:
    scopes = {rule.id: rule.scope for rule in (*core_rules(), *rules)}
    for rule in rules:
        if not isinstance(rule.requires, tuple):
            yield f"rule {rule.id} needs a tuple of ids as requires"
            return
        for required in rule.requires:
            if required not in scopes:
                close = difflib.get_close_matches(str(required), sorted(scopes), 1)
                hint = f"did you mean {close[0]!r}?" if close else "it may be one of this plugin or of core"
                yield f"rule {rule.id} requires {required!r}, which is no rule; {hint}"
            elif scopes[required] not in (Scope.INSTANCE, rule.scope):
                yield (
                    f"rule {rule.id} is about one {rule.scope.value} and requires {required}, "
                    f"which is about a {scopes[required].value}"
                )
    for circle in cycles(rules):
        yield f"rules require each other in a circle: {' -> '.join(circle)}"


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
    faults = [*_scope_faults(rule)]
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


def _scope_faults(rule: Rule) -> Iterator[str]:
    name = f"rule {rule.id}"
    if not isinstance(rule.scope, Scope):
        yield f"{name} has the scope {rule.scope!r}, not a kvferry.api.Scope"
        return
    heads = {path.split(".", 1)[0] for path in (*rule.when.reads(), *rule.require.reads())}
    match rule.scope:
        case Scope.PAIR if not heads.issuperset(PAIR_WORDS):
            yield f"{name} is about a pair and does not read facts of both, 'one.' and 'other.'"
        case Scope.FLEET if INSTANCES not in heads:
            yield f"{name} is about a fleet and reads no fact below 'instances.*'"
        case Scope.INSTANCE if not heads.isdisjoint((INSTANCES, *PAIR_WORDS)):
            yield f"{name} is about one instance and reads facts of several"
    if rule.scope is not Scope.INSTANCE and rule.each is not None:
        yield f"{name} is about several instances and cannot be a template over {rule.each!r}"
