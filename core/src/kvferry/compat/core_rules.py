"""The rules that core owns. Rules about one plugin belong to that plugin."""

from __future__ import annotations

from kvferry.api import Rule
from kvferry.compat.engine_rules import ENGINE_RULES
from kvferry.compat.fleet_rules import FLEET_RULES
from kvferry.compat.host_rules import HOST_RULES
from kvferry.compat.lower_tier_rules import LOWER_TIER_RULES
from kvferry.compat.tier_rules import TIER_RULES

RULE_PREFIX = "CORE"

__all__ = ["RULE_PREFIX", "core_rules"]


def core_rules() -> tuple[Rule, ...]:
    """All rules of core in the order of their ids."""
    rules = (*TIER_RULES, *LOWER_TIER_RULES, *ENGINE_RULES, *HOST_RULES, *FLEET_RULES)
    return tuple(sorted(rules, key=lambda rule: rule.id))
