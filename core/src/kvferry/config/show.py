"""What a configuration says and where each value comes from, for people and for programs."""

from __future__ import annotations

import json
import re
from typing import Any

from kvferry.config.leaves import HIDDEN, Leaf
from kvferry.config.nodes import dotted
from kvferry.config.schema import Config
from kvferry.config.yaml_text import resolve_plain


def config_text(config: Config) -> str:
    """One line for each value: dotted path, value as a configuration would say it, origin."""
    rows = [(dotted(leaf.path), _shown_text(leaf), leaf.origin) for leaf in config.leaves]
    path_width = max((len(path) for path, _, _ in rows), default=0)
    value_width = max((len(value) for _, value, _ in rows), default=0)
    return "".join(
        f"{path:<{path_width}}  {value:<{value_width}}  {origin}\n" for path, value, origin in rows
    )


def config_data(config: Config) -> list[dict[str, Any]]:
    """One object for each value, fit for JSON: ``path`` (list of keys), ``value``, ``origin``."""
    return [{"path": list(leaf.path), "value": _shown(leaf), "origin": leaf.origin} for leaf in config.leaves]


def _shown(leaf: Leaf) -> Any:
    return HIDDEN if leaf.secret and leaf.written is not None else leaf.written


def _shown_text(leaf: Leaf) -> str:
    shown = _shown(leaf)
    return HIDDEN if leaf.secret and shown is not None else _flow(shown)


def _flow(value: Any) -> str:
    """``value`` in YAML on one line; reads back as the same value."""
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and _BARE.fullmatch(value) and resolve_plain(value) == value:
        return value
    return json.dumps(value, ensure_ascii=not (isinstance(value, str) and value.isprintable()))


# A colon inside is harmless only between other characters, and '#' only without a space before it.
_BARE = re.compile(r"[A-Za-z0-9_./](?:[A-Za-z0-9_./@%+-]|:(?=[A-Za-z0-9_./]))*")
