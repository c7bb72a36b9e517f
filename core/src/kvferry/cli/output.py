"""Plain text tables and JSON. No terminal library: output is read by people and by programs alike."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from kvferry.plugins import PluginRecord, PluginState

_NOTHING = "-"


def add_format(parser: argparse.ArgumentParser) -> None:
    """The option ``--format text|json``."""
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines, two spaces between columns and none at the end."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def plugins_text(records: Sequence[PluginRecord]) -> str:
    """A table with one row for each plugin, reason and remedy below the row."""
    head = ("NAME", "STATE", "DISTRIBUTION", "API", "PROVIDES")
    lines = table([head, *(_row(record) for record in records)])
    shown = [lines[0]]
    for line, record in zip(lines[1:], records, strict=True):
        shown.append(line)
        shown += [f"  why  {record.reason}"] if record.reason else []
        shown += [f"  fix  {record.remedy}"] if record.remedy else []
        shown += [f"  note {remark}" for remark in record.remarks]
        if record.broken and not record.required:
            shown.append(f"  note skipped, because {record.origin} says on_error: skip")
    if any(record.state is PluginState.FOUND for record in records):
        shown += ["", "A plugin in state 'found' is installed and not listed; nothing of it was imported."]
    return "\n".join(shown)


def _row(record: PluginRecord) -> tuple[str, str, str, str, str]:
    return (
        record.name,
        record.state.value,
        record.distribution or _NOTHING,
        _NOTHING if record.manifest is None else record.manifest.api,
        ", ".join(map(str, record.provides)) or _NOTHING,
    )


def plugin_json(record: PluginRecord) -> dict[str, Any]:
    """The row as plain data; ``api`` is null until the plugin was imported."""
    return {
        "name": record.name,
        "state": record.state.value,
        "distributions": [{"name": each.name, "version": each.version} for each in record.distributions],
        "module": record.module,
        "api": None if record.manifest is None else record.manifest.api,
        "summary": "" if record.manifest is None else record.manifest.summary,
        "provides": [{"kind": each.kind, "name": each.name} for each in record.provides],
        "listed": record.listed,
        "required": record.required,
        "origin": record.origin,
        "reason": record.reason,
        "remedy": record.remedy,
        "remarks": list(record.remarks),
    }
