"""Rules that stand on other rules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from kvferry.api import Rule
from kvferry.compat.findings import Finding, Outcome, OwnedRule


def required_first(rules: Iterable[OwnedRule]) -> list[OwnedRule]:
    """The rules in an order in which each comes behind all that it requires.

    An id that is not among them is passed over. A cycle, which :func:`cycles` finds when a plugin is
    loaded, is cut where it closes.
    """
    by_id: dict[str, list[OwnedRule]] = {}
    for owned in rules:
        by_id.setdefault(owned.rule.id, []).append(owned)
    requires = {
        rule_id: [each for owned in same for each in owned.rule.requires if each in by_id]
        for rule_id, same in by_id.items()
    }
    ordered: list[OwnedRule] = []
    entered: set[str] = set()
    for start in by_id:
        waiting = [] if start in entered else [start]
        entered.add(start)
        while waiting:
            following = next((each for each in requires[waiting[-1]] if each not in entered), None)
            if following is None:
                ordered += by_id[waiting.pop()]
            else:
                entered.add(following)
                waiting.append(following)
    return ordered


def cycles(rules: Iterable[Rule]) -> Iterator[tuple[str, ...]]:
    """Circles of rules that require each other, each from one id back to that id."""
    graph = {rule.id: set(rule.requires) for rule in rules}
    while graph:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle: list[str] = error.args[1]
            # The sorter goes from what is required to what requires it.
            yield tuple(reversed(circle))
            for rule_id in circle:
                graph.pop(rule_id, None)
        else:
            return


def unmet(
    owned: OwnedRule,
    instances: Collection[str],
    member: str | None,
    found: Mapping[str, Iterable[Finding]],
) -> str:
    """Why ``owned`` is not judged, given what its required rules came to; empty when it is.

    Of several instances only those count that this application is about. Rules over the same section
    stand on each other member by member. A waived rule is settled: the user answers for it, and
    whatever stands on it is judged.
    """
    for required in owned.rule.requires:
        for finding in found.get(required, ()):
            same_section = finding.rule.each == owned.rule.each
            if same_section and None not in (member, finding.member) and finding.member != member:
                continue
            if not set(finding.instances) <= set(instances):
                continue
            if finding.not_judged:
                return finding.not_judged
            if finding.troubles:
                violated = finding.outcome is Outcome.VIOLATED
                return f"{required} {'is violated' if violated else 'could not be verified'}"
    return ""
