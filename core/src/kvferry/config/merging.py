"""Laying sources over each other, after short spellings are written out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve

from kvferry.config.nodes import ConfigPath, Fault, Node, Place, Source, fault


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


def merged(base: Node, over: Node) -> Node:
    """``over`` laid on ``base``: mappings join, anything else is replaced as a whole.

    Names of variables carry no letter case, so they meet keys in any case; a spelling from
    elsewhere is the one that stays.
    """
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    children = dict(base.value)
    for key, child in over.value.items():
        name = _matching(children, key, child)
        if name is None:
            children[key] = child
            continue
        result = merged(children[name], child)
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
