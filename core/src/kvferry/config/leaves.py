"""Every configured value as one row: path, value, how it is written, origin."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import attrs
from attrs import evolve, frozen

from kvferry.api.units import ByteLimit, ByteSize, Duration, format_duration, format_limit, format_size
from kvferry.config.fields import Role, is_secret, role
from kvferry.config.hints import optional_of, type_hints
from kvferry.config.nodes import DEFAULT, ConfigPath, Node

HIDDEN = "***"


@frozen(kw_only=True)
class Leaf:
    """One value. A list of plain values is one leaf, and so is an empty list or mapping."""

    path: ConfigPath
    value: Any
    """As rules compare it: bytes and seconds as numbers, an enum member as its value."""
    written: Any
    """As a configuration would say it, in JSON's types: ``16GiB``, not 17179869184."""
    origin: str
    secret: bool = False
    in_mapping: bool = False
    """Whether the last part of its path is a key that the user made up."""


def leaves_of(
    instance: Any, node: Node | None, path: ConfigPath = (), *, secret: bool = False
) -> Iterator[Leaf]:
    """Leaves of a structured section. ``node`` is what it was structured from; None for defaults."""
    hints = type_hints(type(instance))
    for attribute in attrs.fields(type(instance)):
        value = getattr(instance, attribute.name)
        if role(attribute) is Role.OWN_KEYS and value is not None:
            # The plugin's keys stand beside core's: same path, same node.
            yield from leaves_of(value, node, path, secret=secret)
        elif role(attribute) is Role.KEY:
            child = None if node is None else node.find(attribute.name)
            below = (*path, attribute.name)
            hint = hints[attribute.name]
            yield from _leaves(value, hint, child, below, secret=secret or is_secret(attribute))


def _leaves(value: Any, hint: Any, node: Node | None, path: ConfigPath, *, secret: bool) -> Iterator[Leaf]:
    hint = optional_of(hint) or hint
    if attrs.has(type(value)):
        yield from leaves_of(value, node, path, secret=secret)
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            child = None if node is None else node.find(key)
            for leaf in _leaves(item, get_args(hint)[1], child, (*path, key), secret=secret):
                yield evolve(leaf, in_mapping=True) if leaf.path == (*path, key) else leaf
    elif isinstance(value, (tuple, list)) and any(attrs.has(type(item)) for item in value):
        nodes = node.value if node is not None and isinstance(node.value, tuple) else ()
        for index, item in enumerate(value):
            child = nodes[index] if index < len(nodes) else None
            inner = _item_hint(hint, index)
            yield from _leaves(item, inner, child, (*path, str(index)), secret=secret)
    else:
        yield Leaf(
            path=path,
            value=_comparable(value),
            written=_written(value, hint),
            origin=str(DEFAULT if node is None else node.place),
            secret=secret,
        )


def _comparable(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return tuple(_comparable(item) for item in value)
    return value


def _written(value: Any, hint: Any) -> Any:
    if value is None:
        return None
    hint = optional_of(hint) or hint
    if hint is ByteSize:
        return format_size(value)
    if hint is ByteLimit:
        return format_limit(value)
    if hint is Duration:
        return format_duration(value)
    if isinstance(value, (tuple, list)):
        return [_written(item, _item_hint(hint, index)) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        inner = get_args(hint)[1] if value else None
        return {key: _written(item, inner) for key, item in value.items()}
    return _comparable(value)


def _item_hint(hint: Any, index: int) -> Any:
    inner = [item for item in get_args(hint) if item is not ...]
    return inner[min(index, len(inner) - 1)]
