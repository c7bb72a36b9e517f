"""What becomes of lower tiers, for whoever reads the log: once each, and never a flood."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from attrs import define, field

from kvferry.control.lower import LowerTier

logger = logging.getLogger(__name__)

TOLD_EVERY_SECONDS = 60.0
"""Between two lines about one tier of the same kind; what happens in between is counted."""

_BACK_PRESSURE = {
    "skipped": "were not copied down, because too much was on its way or the tier was not open",
    "no_space": "found no room in the store",
}
_FAULTS = {
    "failed_stores": "could not be copied down",
    "failed_fetches": "could not be brought up",
    "corrupt": "came back damaged",
}


@define
class _Told:
    """What was said of a tier."""

    counts: Counter[str] = field(factory=Counter)
    asked: dict[int, float] = field(factory=dict)
    """When the workers were asked to open it, by the number of the opening."""
    opening: int = 0
    next: dict[str, float] = field(factory=dict)
    """When something of a kind may be said again."""


class TierLog:
    """Compares how tiers are with what was said of them. Not thread-safe.

    An opening is told when the tier is in use, a failure with its reason and when the tier is opened again.
    Of chunks that were skipped or failed there is one line in :data:`TOLD_EVERY_SECONDS`, with counts.
    """

    def __init__(self, seconds: float = TOLD_EVERY_SECONDS) -> None:
        self._seconds = seconds
        self._tiers: dict[str, _Told] = {}
        self._reasons: dict[str, str] = {}

    def asked(self, tier: str, opening: int, now: float) -> None:
        """The workers are asked to open the tier."""
        self._of(tier).asked = {opening: now}

    def failed(self, tier: str, reason: str) -> None:
        """Some chunks of the tier failed, for this reason."""
        self._reasons[tier] = reason or self._reasons.get(tier, "")

    def tell(self, tiers: Sequence[LowerTier], now: float) -> None:
        """Say what is new."""
        for tier in tiers:
            told = self._of(tier.name)
            if tier.usable and told.opening != tier.opening:
                self._tell_open(tier, told, now)
            elif tier.counts["failures"] != told.counts["failures"]:
                self._tell_failure(tier, told, now)
            self._tell_counts(tier, told, now, logging.INFO, _BACK_PRESSURE)
            self._tell_counts(tier, told, now, logging.WARNING, _FAULTS)

    def _tell_open(self, tier: LowerTier, told: _Told, now: float) -> None:
        found = tier.counts["adopted"] - told.counts["adopted"]
        foreign = tier.counts["foreign"] - told.counts["foreign"]
        failures = tier.counts["failures"] - told.counts["failures"]
        told.counts.update(adopted=found, foreign=foreign, failures=failures)
        logger.info(
            "kvferry: tier %s is open%s%s after %.1f s: %d chunks were found%s, %d fit",
            tier.name,
            " again" if tier.opening > 1 else "",
            f" after {failures} failures more" if failures else "",
            now - told.asked.get(tier.opening, now),
            found,
            f" and {foreign} of others" if foreign else "",
            tier.capacity,
        )
        told.opening = tier.opening
        told.next.pop("failure", None)

    def _tell_failure(self, tier: LowerTier, told: _Told, now: float) -> None:
        if now < told.next.get("failure", now):
            return
        times = tier.counts["failures"] - told.counts["failures"]
        logger.warning(
            "kvferry: tier %s failed%s and is not used; it is opened again after %g s: %s",
            tier.name,
            f" {times} times" if times > 1 else "",
            tier.settings.retry_after,
            tier.reason,
        )
        told.counts["failures"] += times
        told.next["failure"] = now + self._seconds

    def _tell_counts(
        self, tier: LowerTier, told: _Told, now: float, level: int, names: dict[str, str]
    ) -> None:
        more = {name: tier.counts[name] - told.counts[name] for name in names}
        kind = str(level)
        if not any(more.values()) or now < told.next.get(kind, now):
            return
        reason = self._reasons.pop(tier.name, "") if names is _FAULTS else ""
        logger.log(
            level,
            "kvferry: tier %s: %s%s",
            tier.name,
            "; ".join(f"{count} chunks {names[name]}" for name, count in more.items() if count),
            f": {reason}" if reason else "",
        )
        told.counts.update(more)
        told.next[kind] = now + self._seconds

    def _of(self, tier: str) -> _Told:
        return self._tiers.setdefault(tier, _Told())
