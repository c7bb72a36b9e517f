"""The result of a check, as text, as JSON and as an exit code."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from typing import Any

from attrs import frozen

from kvferry.api import Severity
from kvferry.compat.findings import Finding, Outcome
from kvferry.compat.rendering import finding_json, finding_text, not_judged_text
from kvferry.compat.waivers import JudgedWaiver


class ExitCode(enum.IntEnum):
    """What ``kvferry check`` ends with."""

    CLEAN = 0
    WARNINGS = 1
    """Warnings, and ``--strict`` was given."""
    ERRORS = 2
    UNVERIFIED = 3
    """No error, but an error rule that could not be verified."""
    BROKEN_PLUGIN = 4
    """A listed plugin is not usable, so its rules did not judge either."""

    @staticmethod
    def worst(*codes: ExitCode) -> ExitCode:
        """The code that says most: a broken plugin, then errors, unverified errors, warnings."""
        order = (
            ExitCode.BROKEN_PLUGIN,
            ExitCode.ERRORS,
            ExitCode.UNVERIFIED,
            ExitCode.WARNINGS,
        )
        return next((code for code in order if code in codes), ExitCode.CLEAN)


@frozen(kw_only=True)
class Report:
    """All findings, those that are fine included, ordered by severity and rule id."""

    findings: tuple[Finding, ...]
    waivers: tuple[JudgedWaiver, ...] = ()

    def select(self, outcome: Outcome, severity: Severity | None = None) -> tuple[Finding, ...]:
        """Findings with this outcome that no waiver covers."""
        return tuple(
            finding
            for finding in self.findings
            if finding.outcome is outcome
            and finding.waiver is None
            and severity in (None, finding.rule.severity)
        )

    @property
    def prevents_start(self) -> bool:
        """True with an unwaived error that is violated or could not be verified."""
        return self.exit_code() is not ExitCode.CLEAN

    def exit_code(self, *, strict: bool = False) -> ExitCode:
        """The exit code for this report alone; plugins and configuration are judged elsewhere."""
        if self.select(Outcome.VIOLATED, Severity.ERROR):
            return ExitCode.ERRORS
        if self.select(Outcome.UNVERIFIED, Severity.ERROR):
            return ExitCode.UNVERIFIED
        warned = any(f.troubles and f.rule.severity is Severity.WARNING for f in self.findings)
        if strict and (warned or any(waiver.warns for waiver in self.waivers)):
            return ExitCode.WARNINGS
        return ExitCode.CLEAN

    @property
    def shown(self) -> tuple[Finding, ...]:
        """The findings that a reader should see in full."""
        return tuple(filter(_shown, self.findings))

    def blocks(self, findings: Iterable[Finding] | None = None) -> list[str]:
        """One text for everything a reader should see; of the findings only those given, if any are.

        Rules that hold or do not apply are only counted, and so are notes that could not be
        verified. Rules that were not judged, because a rule that they require is in trouble, have a
        line each behind the findings.
        """
        shown = [finding_text(finding) for finding in (self.shown if findings is None else findings)]
        shown += [text for text in [not_judged_text(self.findings)] if text]
        return shown + [text for text in (waiver.text() for waiver in self.waivers) if text]

    @property
    def remarkable(self) -> bool:
        """Whether an engine that starts has to log anything: a waiver that lifts nothing is for those
        who ask."""
        return bool(self.shown) or any(waiver.warns for waiver in self.waivers)

    def text(self) -> str:
        """All :meth:`blocks`, then one line of counts."""
        return "\n\n".join([*self.blocks(), self.summary()])

    def summary(self) -> str:
        """``9 checks: 5 ok, 2 not applicable, 1 error, 1 warning``."""
        counted: Counter[str] = Counter(_category(finding) for finding in self.findings)
        counted["warning"] += sum(waiver.warns for waiver in self.waivers)
        counted["note"] += sum(bool(waiver.text()) and not waiver.warns for waiver in self.waivers)
        parts = [f"{counted[name]} {_plural(name, counted[name])}" for name in _CATEGORIES if counted[name]]
        total = len(self.findings)
        head = f"{total} {_plural('check', total)}"
        return f"{head}: {', '.join(parts)}" if parts else f"{head}"

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings, numbers and booleans."""
        return {
            "summary": self.summary(),
            "findings": [finding_json(finding) for finding in self.findings],
            "waivers": [judged.to_json() for judged in self.waivers],
        }


_CATEGORIES = (
    "error",
    "unverified error",
    "warning",
    "unverified warning",
    "note",
    "unverified note",
    "waived",
    "ok",
    "not applicable",
    "not judged",
)


def _plural(name: str, count: int) -> str:
    return name if count == 1 or name in ("waived", "ok", "not applicable", "not judged") else f"{name}s"


def _category(finding: Finding) -> str:
    if finding.waiver is not None:
        return "waived"
    if finding.not_judged:
        return "not judged"
    match finding.outcome:
        case Outcome.OK:
            return "ok"
        case Outcome.NOT_APPLICABLE:
            return "not applicable"
        case Outcome.VIOLATED:
            return finding.rule.severity.value
        case Outcome.UNVERIFIED:
            return f"unverified {finding.rule.severity.value}"


def _shown(finding: Finding) -> bool:
    if finding.outcome is Outcome.VIOLATED:
        return True
    return finding.outcome is Outcome.UNVERIFIED and finding.rule.severity is not Severity.NOTE
