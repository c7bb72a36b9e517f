"""One finding as text for people and as plain data for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.compat.findings import Finding, Outcome
from kvferry.compat.values import fact_text, placeholders
from kvferry.compat.views import INSTANCES, PAIR_WORDS, WILDCARD, plain_path, stands_for

_VARIABLE = "env "
"""How the origin of a value begins that an environment variable gave."""


_UNVERIFIED_FIX = (
    "run the check where what is missing is known, or give it in a file: kvferry check --facts FACTS FILE"
)


def finding_text(finding: Finding) -> str:
    """One finding with its formula, its facts and where they come from."""
    rule = finding.rule
    label = f"{rule.severity.value}[{rule.id}]"
    if finding.waiver is not None:
        label = f"waived {label}"
    if finding.instances:
        label = f"{label} {', '.join(finding.instances)}:"
    if finding.outcome is Outcome.UNVERIFIED:
        lines = [f"{label} could not be verified: {finding.require}"]
    else:
        lines = [f"{label} {finding.message}"]
    lines.append(f"  when     {finding.when}")
    lines.append(f"  require  {finding.require}")
    forms = {path: form for text in (rule.message, rule.fix) for path, form in placeholders(text)}
    for fact in finding.facts:
        form = _form_of(fact.path, forms)
        lines.append(f"  fact     {fact_text(fact, form)}  <- {fact.origin}")
    if finding.outcome is Outcome.UNVERIFIED:
        lines += [f"  missing  {path}" for path in finding.missing]
    if finding.broken:
        lines.append(f"  broken   the rule itself failed with {finding.broken}")
    if finding.waiver is not None:
        lines.append(f"  waiver   {finding.waiver.reason}  <- {finding.waiver.origin}")
    fix = fix_text(finding)
    lines += [f"  fix      {fix}"] if fix else []
    owner = f"{finding.owner}, {finding.distribution}" if finding.distribution else finding.owner
    lines.append(f"  source   {rule.source}  ({owner}, since {rule.since})")
    return "\n".join(lines)


def fix_text(finding: Finding) -> str:
    """What to do about a finding, whatever it comes from; empty for a rule that holds."""
    if finding.broken:
        waive = f"; until then waive {finding.rule.id} with a reason" if finding.rule.waivable else ""
        return f"report it as a fault of {finding.owner}{waive}"
    if finding.outcome is Outcome.UNVERIFIED:
        return _UNVERIFIED_FIX if finding.missing else ""
    if finding.outcome is not Outcome.VIOLATED:
        return ""
    origins = dict.fromkeys(fact.origin for fact in finding.facts if fact.origin.startswith(_VARIABLE))
    if not origins:
        return finding.fix
    shown = ", ".join(origin.removeprefix(_VARIABLE) for origin in origins)
    if len(finding.instances) > 1:
        count = "counts" if len(origins) == 1 else "count"
        return f"unset {shown}, which {count} for every file, or else: {finding.fix}"
    return f"change or unset {shown}, or else: {finding.fix}"


def not_judged_text(findings: Iterable[Finding]) -> str:
    """One line for each rule that stands on a rule in trouble; empty when there is none."""
    lines = []
    for finding in findings:
        if finding.not_judged:
            about = ", ".join([*finding.instances, *filter(None, [finding.member])])
            shown = f"{finding.rule.id} {about}" if about else finding.rule.id
            lines.append(f"not judged: {shown}, because {finding.not_judged}")
    return "\n".join(dict.fromkeys(lines))


def _form_of(path: str, forms: dict[str, str]) -> str:
    """The format that the rule's own text uses for this fact, whatever its wildcards stand for."""
    for named, form in forms.items():
        head, _, rest = plain_path(named).partition(".")
        pattern = f"{INSTANCES}.{WILDCARD}.{rest}" if head in PAIR_WORDS else plain_path(named)
        if form and stands_for(pattern, path):
            return form
    return ""


def finding_json(finding: Finding) -> dict[str, Any]:
    """The finding as plain data; fact values that JSON lacks are written as text."""
    rule = finding.rule
    waiver = finding.waiver
    return {
        "id": rule.id,
        "severity": rule.severity.value,
        "outcome": finding.outcome.value,
        "scope": rule.scope.value,
        "instances": list(finding.instances),
        "member": finding.member,
        "message": finding.message,
        "when": finding.when,
        "require": finding.require,
        "facts": [
            {"path": fact.path, "value": plain(fact.value), "origin": fact.origin} for fact in finding.facts
        ],
        "missing": list(finding.missing),
        "not_judged": finding.not_judged,
        "broken": finding.broken,
        "waiver": None if waiver is None else {"reason": waiver.reason, "origin": waiver.origin},
        "fix": fix_text(finding) or finding.fix,
        "source": rule.source,
        "owner": finding.owner,
        "distribution": finding.distribution,
        "since": rule.since,
    }


def plain(value: object) -> Any:
    """``value`` in the types that JSON has; anything else becomes its text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [plain(item) for item in value]
    return str(value)
