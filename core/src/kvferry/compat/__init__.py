"""The compatibility checker: rules as data, three-valued, every violation in one report."""

from kvferry.compat.catalogue import FactCatalogue, OwnedFactSpec
from kvferry.compat.checker import check
from kvferry.compat.core_rules import core_rules
from kvferry.compat.examples import run_examples
from kvferry.compat.findings import Finding, Outcome, OwnedRule, Waiver
from kvferry.compat.fleet import FleetMember, check_fleet
from kvferry.compat.report import ExitCode, Report
from kvferry.compat.validation import rule_faults
from kvferry.compat.waivers import JudgedWaiver, WaiverState

__all__ = [
    "ExitCode",
    "FactCatalogue",
    "Finding",
    "FleetMember",
    "JudgedWaiver",
    "Outcome",
    "OwnedFactSpec",
    "OwnedRule",
    "Report",
    "Waiver",
    "WaiverState",
    "check",
    "check_fleet",
    "core_rules",
    "rule_faults",
    "run_examples",
]
