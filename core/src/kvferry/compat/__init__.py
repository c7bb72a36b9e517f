"""The compatibility checker: rules as data, three-valued, every violation in one report."""

from kvferry.compat.checker import check
from kvferry.compat.core_rules import core_rules
from kvferry.compat.examples import run_examples
from kvferry.compat.findings import Finding, Outcome, OwnedRule, Waiver
from kvferry.compat.report import ExitCode, Report
from kvferry.compat.validation import rule_faults

__all__ = [
    "ExitCode",
    "Finding",
    "Outcome",
    "OwnedRule",
    "Report",
    "Waiver",
    "check",
    "core_rules",
    "rule_faults",
    "run_examples",
]
