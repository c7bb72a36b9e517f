"""The judge: every rule over all facts, all findings at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvferry.api import Facts, Scope
from kvferry.compat.application import Subject, apply
from kvferry.compat.dependencies import required_first, unmet
from kvferry.compat.findings import Finding, OwnedRule, Waiver
from kvferry.compat.report import Report
from kvferry.compat.waivers import judge_waivers


def check(rules: Iterable[OwnedRule], facts: Facts, waivers: Sequence[Waiver] = ()) -> Report:
    """Apply every rule about one instance and report everything found, ordered by severity and then
    by rule id. Rules about several instances wait for :func:`kvferry.compat.check_fleet`.

    A template (``Rule.each``) is applied to every member of its section; without members it does
    not apply. A rule whose required rules are in trouble is not judged. A waiver marks the findings
    of its rule and removes nothing from the report.
    """
    owned = tuple(rules)
    mine = [each for each in owned if each.rule.scope is Scope.INSTANCE]
    found = judge_all(mine, [Subject(facts=facts, waivers=waivers)], {})
    findings = [finding for each in found.values() for finding in each]
    elsewhere = {each.rule.id for each in owned} - {each.rule.id for each in mine}
    return Report(
        findings=tuple(sorted(findings, key=Finding.sort_key)),
        waivers=judge_waivers((w for w in waivers if w.rule_id not in elsewhere), owned, findings),
    )


def judge_all(
    rules: Iterable[OwnedRule], subjects: Sequence[Subject], before: Mapping[str, Sequence[Finding]]
) -> dict[str, list[Finding]]:
    """Findings by rule id. ``before`` are findings of rules that these may require."""
    known: dict[str, list[Finding]] = {rule_id: list(findings) for rule_id, findings in before.items()}
    found: dict[str, list[Finding]] = {}

    def why_not(owned: OwnedRule, subject: Subject, member: str | None) -> str:
        return unmet(owned, subject.instances, member, known)

    for owned in required_first(rules):
        findings = [finding for subject in subjects for finding in apply(owned, subject, why_not)]
        found.setdefault(owned.rule.id, []).extend(findings)
        known.setdefault(owned.rule.id, []).extend(findings)
    return found
