"""What a rule came to: a closed set of outcomes and the reasons beside them."""

from __future__ import annotations

import enum

from attrs import frozen

from kvferry.api import Fact, Rule, Severity

SEVERITY_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}


class Outcome(enum.Enum):
    """Closed set of results of one rule on one set of facts."""

    OK = "ok"
    NOT_APPLICABLE = "not-applicable"
    VIOLATED = "violated"
    UNVERIFIED = "unverified"
    """A fact that decides the rule is missing. Not a pass."""


@frozen(kw_only=True)
class OwnedRule:
    """A rule and who brought it."""

    rule: Rule
    owner: str
    """Name of the plugin."""
    distribution: str = ""
    """``kvferry-backend-cpu 0.1.0``, for the ``source`` line."""


@frozen(kw_only=True)
class Waiver:
    """The user's word that a rule may be broken, with the reason."""

    rule_id: str
    reason: str
    origin: str


@frozen(kw_only=True)
class Finding:
    """One application of one rule, with everything a reader needs to act on it.

    ``member`` is the section member the rule was applied to (``cpu`` of ``tiers.*``), else ``None``.
    ``instances`` names the configurations of a pair or a fleet, and is empty for a rule about one
    instance. ``missing`` lists the fact paths the rule asked for and nobody knew. ``broken`` says how
    the rule itself failed; such a finding is unverified. ``not_judged`` says which required rule kept
    this one from being judged; such a finding is not applicable.
    """

    rule: Rule
    owner: str
    distribution: str
    outcome: Outcome
    member: str | None
    when: str
    require: str
    message: str
    fix: str
    facts: tuple[Fact, ...]
    missing: tuple[str, ...]
    waiver: Waiver | None = None
    broken: str = ""
    not_judged: str = ""
    instances: tuple[str, ...] = ()

    @property
    def troubles(self) -> bool:
        """Violated or unverified, and not waived."""
        return self.waiver is None and self.outcome in (Outcome.VIOLATED, Outcome.UNVERIFIED)

    def sort_key(self) -> tuple[int, str, tuple[str, ...], str]:
        return (SEVERITY_ORDER[self.rule.severity], self.rule.id, self.instances, self.member or "")
