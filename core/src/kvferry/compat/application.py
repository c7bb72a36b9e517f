"""One application of one rule to one view of the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from attrs import evolve, field, frozen

from kvferry.api import Expression, Facts, Truth
from kvferry.compat.findings import Finding, Outcome, OwnedRule, Waiver
from kvferry.compat.guard import Raised, call_foreign
from kvferry.compat.values import fill, placeholders
from kvferry.compat.views import WILDCARD, FactView, members


@frozen(kw_only=True)
class Subject:
    """What a rule is applied to: facts, how its paths are read there, and what it is called."""

    facts: Facts
    bindings: Mapping[str, str] = field(factory=dict)
    instances: tuple[str, ...] = ()
    waivers: Sequence[Waiver] = ()

    def waiver(self, owned: OwnedRule) -> Waiver | None:
        """The first waiver that lifts this rule; a rule that is not waivable has none."""
        if not owned.rule.waivable:
            return None
        return next((waiver for waiver in self.waivers if waiver.rule_id == owned.rule.id), None)


Unmet = Callable[[OwnedRule, Subject, str | None], str]
"""Why a rule is not judged for this member of the subject, or empty text."""


def nothing_unmet(owned: OwnedRule, subject: Subject, member: str | None) -> str:
    """For a rule that is judged by itself."""
    del owned, subject, member
    return ""


def apply(owned: OwnedRule, subject: Subject, unmet: Unmet = nothing_unmet) -> Iterator[Finding]:
    """Every application of a rule to a subject: one, or one for each member of its section.

    A template without members does not apply.
    """
    section = owned.rule.each
    if section is None:
        yield _judge(owned, subject, FactView(subject.facts, subject.bindings), None, unmet)
        return
    names = members(subject.facts, section)
    for name in names:
        bindings = {**subject.bindings, f"{section}.{WILDCARD}": f"{section}.{name}"}
        yield _judge(owned, subject, FactView(subject.facts, bindings), name, unmet)
    if not names:
        yield _finding(owned, subject, FactView(subject.facts), None, Outcome.NOT_APPLICABLE)


def _judge(owned: OwnedRule, subject: Subject, view: FactView, member: str | None, unmet: Unmet) -> Finding:
    rule = owned.rule
    # A predicate is the plugin's code: what it raises makes the rule unverified, not the check fail.
    applies = call_foreign(lambda: rule.when.evaluate(view))
    if not isinstance(applies, Raised) and applies.value is Truth.FALSE:
        return _finding(owned, subject, view, member, Outcome.NOT_APPLICABLE)
    reason = unmet(owned, subject, member)
    if reason:
        found = _finding(owned, subject, view, member, Outcome.NOT_APPLICABLE)
        return evolve(found, not_judged=reason)
    judged = call_foreign(lambda: _outcome(rule.when, rule.require, view))
    if isinstance(judged, Raised):
        return evolve(_finding(owned, subject, view, member, Outcome.UNVERIFIED), broken=str(judged))
    return _finding(owned, subject, view, member, judged.value)


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
    owned: OwnedRule, subject: Subject, view: FactView, member: str | None, outcome: Outcome
) -> Finding:
    rule = owned.rule
    paths = dict.fromkeys(plain for path in read_paths(owned) for plain in view.concrete(path))
    found = {path: view.get(path) for path in paths}
    needs = {plain for path in needed_paths(owned) for plain in view.concrete(path)}
    told = outcome in (Outcome.VIOLATED, Outcome.UNVERIFIED)
    return Finding(
        rule=rule,
        owner=owned.owner,
        distribution=owned.distribution,
        outcome=outcome,
        member=member,
        instances=subject.instances,
        when=view.text(rule.when),
        require=view.text(rule.require),
        message=fill(rule.message, view),
        fix=fill(rule.fix, view),
        facts=tuple(fact for fact in found.values() if fact is not None),
        missing=tuple(path for path, fact in found.items() if fact is None and path in needs),
        waiver=subject.waiver(owned) if told else None,
    )


def read_paths(owned: OwnedRule) -> Iterable[str]:
    """All paths that a rule reads or names, in the order in which a reader meets them."""
    rule = owned.rule
    return dict.fromkeys([*rule.when.reads(), *rule.require.reads(), *_named(owned)])


def needed_paths(owned: OwnedRule) -> Iterable[str]:
    """Those without which something cannot be said; not those of which only is asked whether they are
    known."""
    rule = owned.rule
    return dict.fromkeys([*rule.when.needs(), *rule.require.needs(), *_named(owned)])


def _named(owned: OwnedRule) -> list[str]:
    return [path for text in (owned.rule.message, owned.rule.fix) for path, _ in placeholders(text)]
