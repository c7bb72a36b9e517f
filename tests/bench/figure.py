"""One number of a bench, and what it has to be."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen


class Goal(enum.Enum):
    AT_LEAST = "≥"
    AT_MOST = "≤"
    NONE = ""
    """Shown for comparison only."""


class Verdict(enum.Enum):
    MET = "met"
    MISSED = "missed"
    SHOWN = ""
    ABSENT = "absent"
    """The bench did not measure it, for example without the native extension."""


@frozen(kw_only=True)
class Figure:
    """One number of a bench's result: ``path`` leads to it through nested mappings."""

    bench: str
    name: str
    path: Sequence[str]
    unit: str = ""
    goal: Goal = Goal.NONE
    target: float = 0.0

    def value(self, result: Mapping[str, Any]) -> float | None:
        """The number, or None when the result does not hold it."""
        found: Any = result
        for key in self.path:
            if not isinstance(found, Mapping) or key not in found:
                return None
            found = found[key]
        return float(found)

    def verdict(self, value: float | None) -> Verdict:
        if value is None:
            return Verdict.ABSENT
        if self.goal is Goal.NONE:
            return Verdict.SHOWN
        met = value >= self.target if self.goal is Goal.AT_LEAST else value <= self.target
        return Verdict.MET if met else Verdict.MISSED
