"""What a configuration says and where each value comes from, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.config.flow import flow_text
from kvferry.config.leaves import HIDDEN, Leaf
from kvferry.config.nodes import dotted
from kvferry.config.schema import Config

_WIDEST = 40
"""A longer value than this moves its own origin to the right, and not those of all others."""


def config_text(config: Config) -> str:
    """One line for each value: dotted path, value as a configuration would say it, origin."""
    rows = [(dotted(leaf.path), _shown_text(leaf), leaf.origin) for leaf in config.leaves]
    path_width = _width(path for path, _, _ in rows)
    value_width = _width(value for _, value, _ in rows)
    return "".join(
        f"{path:<{path_width}}  {value:<{value_width}}  {origin}\n" for path, value, origin in rows
    )


def _width(cells: Iterable[str]) -> int:
    return max((len(cell) for cell in cells if len(cell) <= _WIDEST), default=0)


def config_data(config: Config) -> list[dict[str, Any]]:
    """One object for each value, fit for JSON: ``path`` (list of keys), ``value``, ``origin``."""
    return [{"path": list(leaf.path), "value": _shown(leaf), "origin": leaf.origin} for leaf in config.leaves]


def _shown(leaf: Leaf) -> Any:
    return HIDDEN if leaf.secret and leaf.written is not None else leaf.written


def _shown_text(leaf: Leaf) -> str:
    shown = _shown(leaf)
    return HIDDEN if leaf.secret and shown is not None else flow_text(shown)
