"""Laying sources over each other, after short spellings are written out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from attrs import evolve

from kvferry.config.nodes import (
    VARIABLE_PREFIX,
    ConfigPath,
    Fault,
    Node,
    Place,
    Source,
    brief,
    fault,
)


def branch(path: ConfigPath, leaf: Node, *, complete: bool) -> Node:
    """A tree that holds nothing but ``leaf`` at ``path``."""
    for key in reversed(path):
        leaf = Node({key: leaf}, leaf.place, leaf.place, complete=complete)
    return leaf


def combined(branches: Iterable[Node], place: Place, faults: list[Fault], *, complete: bool) -> Node:
    """Branches of one source joined. Setting one value twice within a source is a fault."""
    root = Node({}, place, place, complete=complete)
    for item in branches:
        root = _join(root, item, (), faults)
    return root


def merged(base: Node, over: Node, faults: list[Fault], path: ConfigPath = ()) -> Node:
    """``over`` laid on ``base``: mappings join, anything else is replaced as a whole.

    Names of variables carry no letter case, so they meet keys in any case; a spelling from
    elsewhere is the one that stays. They carry no ``-`` and no ``.`` either: one that differs from a
    key of ``base`` in nothing else is a fault, because it would stand beside the key that was meant.
    """
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    children = dict(base.value)
    for key, child in over.value.items():
        name = _matching(children, key, child)
        if name is None:
            beside = _meant_beside(base.value, key, child, len(path))
            if beside is not None:
                faults.append(_spelt_otherwise(path, key, beside, child))
                continue
            children[key] = child
            continue
        result = merged(children[name], child, faults, (*path, name))
        if name != key and children[name].key_place.source is Source.ENVIRONMENT:
            # In place, because the order of tiers has a meaning.
            children = {(key if old == name else old): kept for old, kept in children.items()}
            name = key
        children[name] = result
    return evolve(base, value=children, complete=base.complete and over.complete)


def _matching(children: Mapping[str, Node], key: str, child: Node) -> str | None:
    if key in children:
        return key
    return next(
        (
            name
            for name, other in children.items()
            if name.casefold() == key.casefold()
            and Source.ENVIRONMENT in (child.key_place.source, other.key_place.source)
        ),
        None,
    )


def _meant_beside(others: Mapping[str, Node], key: str, child: Node, depth: int) -> str | None:
    """A key that a variable's name cannot spell and that ``key``, a part of one, comes close to."""
    place = child.key_place
    if place.source is not Source.ENVIRONMENT or not depth:
        return None
    if depth >= len(place.name.removeprefix(VARIABLE_PREFIX).split("__")):
        return None  # It stands in the variable's value, where every letter can be written.
    return next((name for name in others if _letters(name) == _letters(key)), None)


def _letters(key: str) -> str:
    return re.sub(r"[^\w]|_", "", key.casefold())


def _spelt_otherwise(path: ConfigPath, key: str, other: str, child: Node) -> Fault:
    variable = VARIABLE_PREFIX + "__".join(path).upper()
    return fault(
        child.key_place,
        (*path, key),
        f"it would stand beside {brief(other)}, which the name of a variable cannot spell",
        remedy=f"write the key inside a value, which joins what is there: {variable}='{{{other}: ...}}'",
    )


def _join(base: Node, other: Node, path: ConfigPath, faults: list[Fault]) -> Node:
    if not isinstance(base.value, dict) or not isinstance(other.value, dict):
        what = f"set twice, also by {base.place}" if base.place != other.place else "set twice"
        faults.append(fault(other.place, path, what, remedy="keep one of the two"))
        return base
    children = dict(base.value)
    for key, child in other.value.items():
        if key in children:
            children[key] = _join(children[key], child, (*path, key), faults)
        else:
            children[key] = child
    return evolve(base, value=children)
