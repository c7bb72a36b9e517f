"""What running instances answer, as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvferry.api.units import format_duration
from kvferry.cli.output import table
from kvferry.compat.values import size_text
from kvferry.data.questions import Cleared, Pins, Quotas, Status
from kvferry.runtime.instances import Instance

_NO_SALT = "(no salt)"


def instances_text(instances: Sequence[Instance], root: Path) -> str:
    """A table with one row for each instance."""
    if not instances:
        return f"no instances below {root}"
    rows = [("NAME", "ID", "STATE", "PID", "VERSION", "TIERS")]
    for each in instances:
        card = each.card
        state = "running" if each.alive else "dead"
        if each.alive and not each.speaks_our_version:
            state = "running, another version"
        rows.append(
            (
                each.name,
                each.id,
                state,
                "-" if card is None else str(card.pid),
                "-" if card is None else card.version,
                "-" if card is None else ", ".join(card.tiers),
            )
        )
    return "\n".join(table(rows))


def status_text(status: Status) -> str:
    """A table of all numbers."""
    workers = "all workers are here" if status.workers_ready else "not all workers are here: nothing is found"
    rows = [(name, str(value)) for name, value in status.numbers.items()]
    slot = f"{size_text(status.slot_bytes)} a slot"
    return "\n".join([f"tier {status.tier}, {slot}; {workers}", "", *table([("NUMBER", "VALUE"), *rows])])


def cleared_text(cleared: Cleared) -> str:
    """One line."""
    text = f"{cleared.removed} chunks removed"
    if cleared.kept:
        text += f"; {cleared.kept} more cannot be found and go once they were read"
    if cleared.doomed:
        text += f"; {cleared.doomed} that were being written will not be kept"
    return text


def quotas_text(quotas: Quotas) -> str:
    """A table with one row for each owner with a quota of its own, and one for all others."""
    rows = [("OWNER", "QUOTA", "HELD", "REFUSED CHUNKS")]
    rows += [
        (owner.owner or _NO_SALT, _quota(owner.quota), size_text(owner.held), str(owner.over_quota))
        for owner in quotas.owners
    ]
    each = f"{_quota(quotas.default)} each"
    rows.append(("all others", each, size_text(quotas.others_held), str(quotas.others_over_quota)))
    lines = table(rows)
    if quotas.evicted:
        lines += ["", f"{quotas.evicted} chunks were evicted"]
    return "\n".join(lines)


def pins_text(pins: Pins) -> str:
    """A table with one row for each pin."""
    if not pins.pins:
        return "nothing is pinned"
    rows = [("NAME", "SALT", "ENDS IN", "CHUNKS")]
    rows += [
        (pin.name, pin.salt or _NO_SALT, format_duration(float(max(0, round(pin.seconds)))), str(pin.chunks))
        for pin in pins.pins
    ]
    return "\n".join(table(rows))


def _quota(size: int | None) -> str:
    return "unlimited" if size is None else size_text(size)
