"""The judge: every rule over all facts, all findings at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvferry.api import Expression, Facts, Truth
from kvferry.compat.findings import Finding, Outcome, OwnedRule, Waiver
from kvferry.compat.guard import Raised, call_foreign
from kvferry.compat.report import Report
from kvferry.compat.values import fill, placeholders
from kvferry.compat.views import FactView, members


def check(rules: Iterable[OwnedRule], facts: Facts, waivers: Sequence[Waiver] = ()) -> Report:
    """Apply every rule and report everything found, ordered by severity and then by rule id.

    A template (``Rule.each``) is applied to every member of its section; without members it does
    not apply. A waiver marks the findings of its rule and removes nothing from the report.
    """
    owned = tuple(rules)
    by_id = {waiver.rule_id: waiver for waiver in waivers}
    findings = [finding for each in owned for finding in _apply(each, facts, by_id.get(each.rule.id))]
    known = {each.rule.id for each in owned}
    return Report(
        findings=tuple(sorted(findings, key=Finding.sort_key)),
        unknown_waivers=tuple(waiver for waiver in waivers if waiver.rule_id not in known),
        rule_ids=tuple(sorted(known)),
    )


def _apply(owned: OwnedRule, facts: Facts, waiver: Waiver | None) -> Iterator[Finding]:
    section = owned.rule.each
    if section is None:
        yield _judge(owned, FactView(facts), None, waiver)
        return
    names = members(facts, section)
    for name in names:
        yield _judge(owned, FactView(facts, section, name), name, waiver)
    if not names:
        yield _finding(owned, FactView(facts), None, Outcome.NOT_APPLICABLE, None, "")


def _judge(owned: OwnedRule, view: FactView, member: str | None, waiver: Waiver | None) -> Finding:
    rule = owned.rule
    # A predicate is the plugin's code: what it raises makes the rule unverified, not the check fail.
    judged = call_foreign(lambda: _outcome(rule.when, rule.require, view))
    if isinstance(judged, Raised):
        return _finding(owned, view, member, Outcome.UNVERIFIED, waiver, str(judged))
    return _finding(owned, view, member, judged.value, waiver, "")


def _outcome(when: Expression, require: Expression, facts: Facts) -> Outcome:
    applies = when.evaluate(facts)
    if applies is Truth.FALSE:
        return Outcome.NOT_APPLICABLE
    holds = require.evaluate(facts)
    if holds is Truth.TRUE:
        return Outcome.OK
    if applies is Truth.TRUE and holds is Truth.FALSE:
        return Outcome.VIOLATED
    return Outcome.UNVERIFIED


def _finding(
    owned: OwnedRule,
    view: FactView,
    member: str | None,
    outcome: Outcome,
    waiver: Waiver | None,
    broken: str,
) -> Finding:
    rule = owned.rule
    reads = [*rule.when.reads(), *rule.require.reads()]
    reads += [path for text in (rule.message, rule.fix) for path, _ in placeholders(text)]
    paths = dict.fromkeys(plain for path in reads for plain in view.concrete(path))
    found = {path: view.get(path) for path in paths}
    told = outcome in (Outcome.VIOLATED, Outcome.UNVERIFIED)
    return Finding(
        rule=rule,
        owner=owned.owner,
        distribution=owned.distribution,
        outcome=outcome,
        member=member,
        when=_bound_text(rule.when, rule.each, member),
        require=_bound_text(rule.require, rule.each, member),
        message=fill(rule.message, view),
        fix=fill(rule.fix, view),
        facts=tuple(fact for fact in found.values() if fact is not None),
        missing=tuple(path for path, fact in found.items() if fact is None),
        waiver=waiver if told else None,
        broken=broken,
    )


def _bound_text(expression: Expression, section: str | None, member: str | None) -> str:
    text = str(expression)
    if section is None or member is None:
        return text
    return text.replace(f"{section}.*", f"{section}.{member}")
