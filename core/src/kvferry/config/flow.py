"""A value in YAML on one line."""

from __future__ import annotations

import json
import re
from typing import Any

from kvferry.config.yaml_text import resolve_plain


def flow_text(value: Any) -> str:
    """``value`` in YAML on one line; reads back as the same value."""
    if isinstance(value, list):
        return "[" + ", ".join(flow_text(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow_text(key)}: {flow_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and _BARE.fullmatch(value) and resolve_plain(value) == value:
        return value
    return json.dumps(value, ensure_ascii=not (isinstance(value, str) and value.isprintable()))


# A colon inside is harmless only between other characters, and '#' only without a space before it.
_BARE = re.compile(r"[A-Za-z0-9_./](?:[A-Za-z0-9_./@%+-]|:(?=[A-Za-z0-9_./]))*")
