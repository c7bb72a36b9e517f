"""A rule is tested by the examples it carries."""

from __future__ import annotations

from kvferry.api import Example, Fact, Rule
from kvferry.compat.application import Subject, apply
from kvferry.compat.findings import Outcome, OwnedRule
from kvferry.compat.values import UNKNOWN

EXAMPLE_ORIGIN = "example"


def run_examples(rule: Rule) -> tuple[str, ...]:
    """Judge every example of ``rule``; one sentence for each that comes out otherwise.

    A failing example must violate the rule, with all facts of its message known. A passing one must
    violate nothing and leave nothing unverified, and one passing example at least must be an ``ok``:
    a rule that never applies has not been shown to pass. Rules that it requires are not looked at.
    """
    problems: list[str] = []
    held = False
    for number, example in enumerate(rule.examples, start=1):
        outcomes, messages = _judge(rule, example)
        label = f"rule {rule.id}, example {number}"
        held = held or (example.passes and Outcome.OK in outcomes)
        shown = ", ".join(sorted(outcome.value for outcome in outcomes))
        if Outcome.UNVERIFIED in outcomes:
            problems.append(f"{label} is unverified: it lacks facts or the rule raises")
        elif example.passes and Outcome.VIOLATED in outcomes:
            problems.append(f"{label} should pass and is {shown}")
        elif not example.passes and Outcome.VIOLATED not in outcomes:
            problems.append(f"{label} should fail and is {shown}")
        elif not example.passes and any(UNKNOWN in message for message in messages):
            problems.append(f"{label} leaves a gap in the message: {' | '.join(messages)}")
    if not held:
        problems.append(f"rule {rule.id} has no example in which it applies and holds")
    return tuple(problems)


def _judge(rule: Rule, example: Example) -> tuple[set[Outcome], list[str]]:
    facts = {
        path: Fact(path=path, value=value, origin=EXAMPLE_ORIGIN) for path, value in example.facts.items()
    }
    # Whatever the rule's scope, its example says the facts in the rule's own paths.
    findings = list(apply(OwnedRule(rule=rule, owner=EXAMPLE_ORIGIN), Subject(facts=facts)))
    violated = [finding for finding in findings if finding.outcome is Outcome.VIOLATED]
    return (
        {finding.outcome for finding in findings},
        [text for finding in violated for text in (finding.message, finding.fix)],
    )
