"""How a directory stands, as plain data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import asdict

from kvferry_sharing_p2p.directory.answers import InstanceStatus
from kvferry_sharing_p2p.directory.messages import Status

SCHEMA_VERSION = 1
_EPOCH_DIGITS = 8
"""Of the 32: enough to tell lives of an instance apart."""


def status_json(answer: Status) -> dict[str, Any]:
    """What the page shows, and ``kvferry controller status --json``."""
    status = asdict(answer.status, value_serializer=lambda _, __, value: getattr(value, "value", value))
    return {"schema": SCHEMA_VERSION, **status, "rejected": answer.rejected}


def status_text(answer: Status, where: str) -> str:
    """A table with one row for each instance, and one of numbers of the whole."""
    status = answer.status
    count = len(status.instances)
    head = f"controller {where}, epoch {status.epoch[:_EPOCH_DIGITS]}: "
    head += "no instances" if not count else f"{count} instance" + ("s" if count > 1 else "")
    parts = [head]
    if status.instances:
        title = ("INSTANCE", "EPOCH", "KEYS", "LAG", "SYNC", "HEARD", "HANDED OUT")
        parts.append("\n".join(_table([title, *map(_row, status.instances)])))
    numbers = {
        "keys": status.keys,
        "memory_bytes": status.memory_bytes,
        **asdict(status.totals),
        "rejected": answer.rejected,
    }
    rows = [("NUMBER", "VALUE"), *((name, str(value)) for name, value in numbers.items())]
    return "\n\n".join([*parts, "\n".join(_table(rows))])


def _row(instance: InstanceStatus) -> tuple[str, ...]:
    keys = str(instance.keys)
    if instance.incoming_keys:
        keys += f" ({instance.incoming_keys} told anew)"
    return (
        instance.instance if instance.instance.isprintable() else repr(instance.instance),
        instance.epoch[:_EPOCH_DIGITS],
        keys,
        str(instance.lag),
        instance.sync.value,
        f"{instance.heard_seconds:.1f} s ago",
        str(instance.handed_out),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines, two spaces between columns and none at the end."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
