"""What became of each waiver: one that lifts nothing is told, because it may hide a mistake."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable

from attrs import frozen

from kvferry.compat.findings import Finding, Outcome, OwnedRule, Waiver


class WaiverState(enum.Enum):
    """Closed set."""

    USED = "used"
    HOLDS = "not-needed"
    """Its rule holds."""
    NOT_APPLICABLE = "not-applicable"
    """Its rule does not apply here."""
    REFUSED = "refused"
    """Its rule cannot be waived."""
    UNKNOWN = "unknown"
    """No loaded plugin owns its rule."""


@frozen(kw_only=True)
class JudgedWaiver:
    """A waiver and what became of it. ``near`` is the id that an unknown one may have meant."""

    waiver: Waiver
    state: WaiverState
    near: str = ""

    @property
    def warns(self) -> bool:
        """Whether it counts as a warning; a waiver that lifts nothing is a note."""
        return self.state in (WaiverState.REFUSED, WaiverState.UNKNOWN)

    def to_json(self) -> dict[str, str]:
        """Plain data."""
        waiver = self.waiver
        return {
            "rule": waiver.rule_id,
            "reason": waiver.reason,
            "origin": waiver.origin,
            "state": self.state.value,
        }

    def text(self) -> str:
        """Empty for a waiver that did its work: that stands with what it lifts."""
        if self.state is WaiverState.USED:
            return ""
        waiver = self.waiver
        what, fix = _TEXTS[self.state]
        if self.near:
            fix = f"did you mean {self.near!r}? Otherwise remove it"
        return "\n".join(
            [
                f"{'warning' if self.warns else 'note'}: the waiver of {waiver.rule_id} {what}",
                f"  fact     waive.{waiver.rule_id} = {waiver.reason!r}  <- {waiver.origin}",
                f"  fix      {fix}",
            ]
        )


_KEEP = "remove it, unless it is meant for another machine or for the engine's start"
_TEXTS = {
    WaiverState.HOLDS: ("lifts nothing: the rule holds", _KEEP),
    WaiverState.NOT_APPLICABLE: ("lifts nothing: the rule does not apply here", _KEEP),
    WaiverState.REFUSED: (
        "lifts nothing: this rule cannot be waived",
        "remove the waiver, and mend what the rule complains about",
    ),
    WaiverState.UNKNOWN: ("names a rule that no loaded plugin owns", "remove the waiver"),
}


def unknown_waivers(waivers: Iterable[Waiver], rules: Iterable[OwnedRule]) -> tuple[JudgedWaiver, ...]:
    """Those whose rule nobody owns, which can be told before anything was judged."""
    judged = judge_waivers(waivers, rules, ())
    return tuple(each for each in judged if each.state is WaiverState.UNKNOWN)


def judge_waivers(
    waivers: Iterable[Waiver], rules: Iterable[OwnedRule], findings: Iterable[Finding]
) -> tuple[JudgedWaiver, ...]:
    """Every waiver with its state, in their order."""
    by_id = {owned.rule.id: owned.rule for owned in rules}
    outcomes: dict[str, set[Outcome]] = {}
    for finding in findings:
        outcomes.setdefault(finding.rule.id, set()).add(finding.outcome)
    judged = []
    for waiver in waivers:
        near = ""
        if waiver.rule_id not in by_id:
            state = WaiverState.UNKNOWN
            near = next(iter(difflib.get_close_matches(waiver.rule_id, sorted(by_id), 1)), "")
        elif not by_id[waiver.rule_id].waivable:
            state = WaiverState.REFUSED
        elif not outcomes.get(waiver.rule_id, set()).isdisjoint((Outcome.VIOLATED, Outcome.UNVERIFIED)):
            state = WaiverState.USED
        elif Outcome.OK in outcomes.get(waiver.rule_id, set()):
            state = WaiverState.HOLDS
        else:
            state = WaiverState.NOT_APPLICABLE
        judged.append(JudgedWaiver(waiver=waiver, state=state, near=near))
    return tuple(judged)
