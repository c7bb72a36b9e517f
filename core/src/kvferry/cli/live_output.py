"""What running instances answer, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvferry.api.units import format_duration
from kvferry.cli.output import table
from kvferry.compat.values import size_text
from kvferry.data.questions import Cleared, LowerStatus, Pins, Quotas, SharingStatus, Status, TierCleared
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
    """A table of numbers for each tier, of what requests have of those below the first and of other
    instances, of those instances, and of what is borrowed from them and lent to them."""
    workers = "all workers are here" if status.workers_ready else "not all workers are here: nothing is found"
    parts = [
        _numbers(f"tier {status.tier}, {size_text(status.slot_bytes)} a slot; {workers}", status.numbers)
    ]
    parts += [_numbers(_health(tier), tier.numbers) for tier in status.lower]
    if status.lower:
        parts.append(_numbers("what requests have of the tiers below the first", status.waiting))
    elif status.sharing:
        parts.append(_numbers("what requests have of other instances", status.waiting))
    if status.sharing:
        parts += _sharing(status.sharing)
    return "\n\n".join(parts)


def _sharing(sharing: SharingStatus) -> list[str]:
    head = f"shared with other instances as {sharing.instance} over {sharing.channel}: {sharing.state}"
    if sharing.reason:
        head += f"; a channel was not open last because: {sharing.reason}"
    rows = [("PEER", "EPOCH", "STANDING", "REASON")]
    rows += [(peer.peer, peer.epoch[:8], peer.standing, peer.reason or "-") for peer in sharing.peers]
    peers = table(rows) if sharing.peers else ["nothing was wanted of any peer lately"]
    return [
        "\n".join([head, "", *peers]),
        _numbers("borrowed from peers", sharing.borrowed),
        _numbers("lent to peers", sharing.lent),
    ]


def _health(tier: LowerStatus) -> str:
    text = f"tier {tier.tier}: {tier.health}" + ("" if tier.health == "open" else ", not used now")
    return f"{text}; it failed last because: {tier.reason}" if tier.reason else text


def _numbers(head: str, numbers: Mapping[str, float]) -> str:
    rows = [
        (name, f"{value:.3f}" if isinstance(value, float) else str(value)) for name, value in numbers.items()
    ]
    return "\n".join([head, "", *table([("NUMBER", "VALUE"), *rows])])


def cleared_text(cleared: Cleared) -> str:
    """One line for each tier, which is only named where there are several."""
    several = len(cleared.by_tier) > 1
    return "\n".join(_cleared_line(part, several) for part in cleared.by_tier)


def _cleared_line(part: TierCleared, named: bool) -> str:
    text = f"tier {part.tier}: " if named else ""
    text += f"{part.removed} chunks removed"
    if part.kept:
        text += f"; {part.kept} more cannot be found and go once they were read"
    if part.doomed:
        text += f"; {part.doomed} that were being written will not be kept"
    if part.health != "open":
        text += f"; the tier is {part.health}, and what its store holds goes when it is opened"
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
    lines = [f"tier {quotas.tier}", "", *table(rows)]
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
