"""Checks of compatibility rules, for the tests of those who declare them."""

from kvferry.compat import rule_faults, run_examples

__all__ = ["rule_faults", "run_examples"]
