"""One finding as text for people and as plain data for programs."""

from __future__ import annotations

from typing import Any

from kvferry.compat.findings import Finding, Outcome
from kvferry.compat.values import fact_text, placeholders


def finding_text(finding: Finding) -> str:
    """One finding with its formula, its facts and where they come from."""
    rule = finding.rule
    label = f"{rule.severity.value}[{rule.id}]"
    if finding.waiver is not None:
        label = f"waived {label}"
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
    if finding.outcome is Outcome.VIOLATED:
        lines.append(f"  fix      {finding.fix}")
    owner = f"{finding.owner}, {finding.distribution}" if finding.distribution else finding.owner
    lines.append(f"  source   {rule.source}  ({owner}, since {rule.since})")
    return "\n".join(lines)


def _form_of(path: str, forms: dict[str, str]) -> str:
    """The format that the rule's own text uses for this fact."""
    if path in forms:
        return forms[path]
    parts = path.split(".")
    for at in range(1, len(parts)):
        starred = ".".join([*parts[:at], "*", *parts[at + 1 :]])
        if starred in forms:
            return forms[starred]
    return ""


def finding_json(finding: Finding) -> dict[str, Any]:
    """The finding as plain data; fact values that JSON lacks are written as text."""
    rule = finding.rule
    waiver = finding.waiver
    return {
        "id": rule.id,
        "severity": rule.severity.value,
        "outcome": finding.outcome.value,
        "member": finding.member,
        "message": finding.message,
        "when": finding.when,
        "require": finding.require,
        "facts": [
            {"path": fact.path, "value": plain(fact.value), "origin": fact.origin} for fact in finding.facts
        ],
        "missing": list(finding.missing),
        "broken": finding.broken,
        "waiver": None if waiver is None else {"reason": waiver.reason, "origin": waiver.origin},
        "fix": finding.fix,
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
