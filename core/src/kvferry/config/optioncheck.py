"""Whether a configuration can fill an options class at all, told before anybody writes one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from kvferry.api import AnySpec, KVFerryError
from kvferry.config.fields import Role, role, selected_spec
from kvferry.config.hints import type_hints
from kvferry.config.nodes import DEFAULT, Node
from kvferry.config.schema import TEXT_KINDS, Config
from kvferry.config.sections import Sections, clashing_keys
from kvferry.config.structure import Structurer


def options_faults(options: type[Any], spec: type[AnySpec]) -> tuple[KVFerryError, ...]:
    """Everything for which no configuration could select a spec of this kind with these options.

    A field's type may be one that a configuration cannot hold, an annotation one that cannot be read,
    and a name may belong to core. What :meth:`RawConfig.structure` takes, this takes, because it asks
    the same code.
    """
    structurer = Structurer(TEXT_KINDS, Sections(None))
    at = Node({}, DEFAULT, DEFAULT, (options.__qualname__,))
    _look(structurer, options, at, frozenset())
    for section in _sections(Config):
        for attribute in attrs.fields(section):
            if role(attribute) is Role.OWN_KEYS and selected_spec(attribute) is spec:
                for what in clashing_keys(section, options):
                    structurer.record(at, what)
    return tuple(each.error for each in structurer.faults)


def _look(structurer: Structurer, options: type[Any], at: Node, above: frozenset[type[Any]]) -> None:
    """``above`` are the classes that are being looked at already: a section may hold others like it."""
    try:
        hints = type_hints(options)
    except (NameError, TypeError) as error:
        structurer.record(at, f"the annotations of {options.__qualname__} cannot be read", why=str(error))
        return
    for attribute in attrs.fields(options):
        if role(attribute) is Role.KEY:
            node = Node(None, DEFAULT, DEFAULT, (*at.path, attribute.name))
            for inner in structurer.check(node, hints[attribute.name]):
                if inner not in above | {options}:
                    _look(structurer, inner, node, above | {options})


def _sections(cls: type[Any]) -> Iterator[type[Any]]:
    """The classes of core's own schema, this one first."""
    yield cls
    structurer = Structurer(TEXT_KINDS, Sections(None))
    for attribute in attrs.fields(cls):
        if role(attribute) is Role.KEY:
            hint = type_hints(cls)[attribute.name]
            for inner in structurer.check(Node(None, DEFAULT, DEFAULT), hint):
                yield from _sections(inner)
