"""Several instances on one host: what their configurations mean together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from attrs import evolve, field, frozen

from kvferry.api import Facts, Scope
from kvferry.compat.application import Subject
from kvferry.compat.checker import judge_all
from kvferry.compat.findings import Finding, OwnedRule, Waiver
from kvferry.compat.report import Report
from kvferry.compat.views import INSTANCES, PAIR_WORDS
from kvferry.compat.waivers import JudgedWaiver, judge_waivers


@frozen(kw_only=True)
class FleetMember:
    """One instance that has been judged by itself.

    ``label`` is its name in paths: unique in the fleet, without a dot. ``name`` is what messages call
    its configuration. ``facts`` are its own, those of the host included.
    """

    label: str
    name: str
    facts: Facts
    report: Report
    waivers: Sequence[Waiver] = field(default=())


def check_fleet(rules: Iterable[OwnedRule], members: Sequence[FleetMember], host: Facts) -> Report:
    """Apply the rules about pairs and fleets to all members together.

    ``host`` are the facts of the machine on which all of them run. Of a rule that two members' plugins
    bring, the first counts. A waiver in any configuration that a finding is about lifts it, and the
    report says where that stands.
    """
    owned = tuple({each.rule.id: each for each in reversed(tuple(rules))}.values())
    single: dict[str, list[Finding]] = {}
    for member in members:
        for finding in member.report.findings:
            single.setdefault(finding.rule.id, []).append(evolve(finding, instances=(member.name,)))
    pairs = [
        _subject(pair, host, dict(zip(PAIR_WORDS, _sections(pair), strict=True)))
        for pair in combinations(members, 2)
    ]
    found = {
        **judge_all(_of(owned, Scope.PAIR), pairs, single),
        **judge_all(_of(owned, Scope.FLEET), [_subject(members, host, {})], single),
    }
    findings = [finding for each in found.values() for finding in each]
    return Report(
        findings=tuple(sorted(findings, key=Finding.sort_key)),
        waivers=tuple(_waivers(owned, members, findings)),
    )


def _of(rules: Iterable[OwnedRule], scope: Scope) -> list[OwnedRule]:
    return [each for each in rules if each.rule.scope is scope]


def _sections(members: Iterable[FleetMember]) -> list[str]:
    return [f"{INSTANCES}.{member.label}" for member in members]


def _subject(members: Sequence[FleetMember], host: Facts, bindings: dict[str, str]) -> Subject:
    facts = dict(host)
    for member, section in zip(members, _sections(members), strict=True):
        for path, fact in member.facts.items():
            facts[f"{section}.{path}"] = evolve(fact, path=f"{section}.{path}")
    return Subject(
        facts=facts,
        bindings=bindings,
        instances=tuple(member.name for member in members),
        waivers=[waiver for member in members for waiver in member.waivers],
    )


def _waivers(
    rules: Sequence[OwnedRule], members: Sequence[FleetMember], findings: Sequence[Finding]
) -> Iterable[JudgedWaiver]:
    """Only waivers of rules about several: the others are told with their instance."""
    together = {each.rule.id for each in rules if each.rule.scope is not Scope.INSTANCE}
    for member in members:
        mine = [finding for finding in findings if member.name in finding.instances]
        yield from judge_waivers((w for w in member.waivers if w.rule_id in together), rules, mine)
