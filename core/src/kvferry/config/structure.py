"""Nodes into attrs instances: strict, and every fault at its place.

cattrs dispatches on annotations; the hooks read nodes instead of plain values, because a plain
value has forgotten where it stood. A hook that cannot give a value records why and raises
:class:`Rejected`; whoever holds the siblings goes on with them, so that one run finds all faults.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

import attrs
from attrs import evolve
from cattrs import Converter

from kvferry.api import ErrorKind
from kvferry.config.advice import (
    boolean_remedy,
    choice_remedy,
    list_remedy,
    mapping_remedy,
    number_remedy,
    odd_letters,
    substitution_remedy,
    unnamed_remedy,
    value_remedy,
)
from kvferry.config.fields import TextKind, TextKinds
from kvferry.config.hints import optional_of
from kvferry.config.nodes import Broken, Fault, Node, brief, describe, fault


class Rejected(Exception):
    """No value; the reason is among the structurer's faults."""


class Structurer:
    """One run over one tree. Not shared between threads.

    ``section`` structures a node into an attrs class; it is handed in because sections know about
    plugins and this module does not.
    """

    def __init__(self, kinds: TextKinds, section: Callable[[Structurer, Node, type[Any]], Any]) -> None:
        self.faults: list[Fault] = []
        self._section = section
        self._converter = self._make_converter(kinds)

    def structure(self, node: Node, annotation: Any) -> Any:
        """The value of ``node``. Raises :class:`Rejected` when there is none."""
        if node.value is Broken.BROKEN:
            raise Rejected
        return self._converter.structure(node, annotation)

    def record(
        self,
        node: Node,
        what: str,
        *,
        why: str = "",
        remedy: str = "",
        kind: ErrorKind = ErrorKind.CONFIG,
    ) -> None:
        """Keep a fault that stands at ``node``."""
        remedy = substitution_remedy(node) or remedy
        self.faults.append(fault(node.place, node.path, what, why=why, remedy=remedy, kind=kind))

    def reject(self, node: Node, expected: str, remedy: str = "") -> Rejected:
        """Record that ``node`` is not what was expected; raise what this returns."""
        text = node.value if isinstance(node.value, str) and not node.secret else ""
        what = f"expected {expected}, not {describe(node)}"
        self.record(node, what, why=odd_letters(text), remedy=remedy)
        return Rejected()

    def check(self, node: Node, annotation: Any) -> list[type[Any]]:
        """Record at ``node`` every part of an annotation that no configuration can hold; the attrs
        classes among the others, whose own fields are not looked at."""
        hook = self._converter.get_structure_hook(annotation)
        is_class = isinstance(annotation, type)
        plain = annotation in (bool, int, float, str)
        if hook == self._unsupported or (
            hook in (self._int, self._float, self._text)
            and not plain
            and not _is_class(enum.Enum)(annotation)
        ):
            with suppress(Rejected):
                self._unsupported(node, annotation)
            return []
        if is_class and attrs.has(annotation):
            return [annotation]
        if optional_of(annotation) is not None:
            return self.check(node, optional_of(annotation))
        inner = () if plain or get_origin(annotation) is None else get_args(annotation)
        return [found for part in inner if part is not ... for found in self.check(node, part)]

    def _make_converter(self, kinds: TextKinds) -> Converter:
        converter = Converter()
        # Later registrations win, so whatever none of the hooks below knows ends here: cattrs' own
        # hooks would coerce ("false" becomes True, 1.9 becomes 1) and cannot read nodes.
        converter.register_structure_hook_func(lambda _: True, self._unsupported)
        converter.register_structure_hook_func(_is_class(enum.Enum), self._enum)
        converter.register_structure_hook_func(_is_generic(Mapping, dict), self._mapping)
        converter.register_structure_hook_func(_is_generic(Sequence, list), self._list)
        converter.register_structure_hook_func(_is_generic(tuple), self._tuple)
        converter.register_structure_hook_func(lambda t: optional_of(t) is not None, self._optional)
        converter.register_structure_hook_func(
            lambda t: isinstance(t, type) and attrs.has(t), lambda n, t: self._section(self, n, t)
        )
        converter.register_structure_hook(bool, self._bool)
        converter.register_structure_hook(int, self._int)
        converter.register_structure_hook(float, self._float)
        converter.register_structure_hook(str, self._text)
        converter.register_structure_hook(bytes, self._unsupported)
        converter.register_structure_hook(Path, self._unsupported)
        for new_type, kind in kinds.items():
            converter.register_structure_hook(
                new_type, self._hook_of(kind, of_text=new_type.__supertype__ is str)
            )
        return converter

    def _hook_of(self, kind: TextKind, *, of_text: bool) -> Callable[[Node, Any], Any]:
        def hook(node: Node, _annotation: Any) -> Any:
            if of_text:
                node = _as_text(node)
            if not isinstance(node.value, str):
                raise self.reject(node, kind.expected, kind.remedy)
            try:
                return kind.parse(node.value)
            except ValueError as error:
                if node.secret:
                    self.record(node, "this value is not acceptable", remedy=kind.remedy)
                else:
                    self.record(node, str(error), why=odd_letters(node.value), remedy=kind.remedy)
                raise Rejected from None

        return hook

    def _bool(self, node: Node, _annotation: Any) -> bool:
        value = node.value
        if isinstance(value, bool):
            return value
        raise self.reject(node, "true or false", boolean_remedy(node))

    def _int(self, node: Node, annotation: Any) -> Any:
        if annotation is not int:
            return self._subclass(node, annotation)
        value = node.value
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self.reject(node, "a whole number", number_remedy(node, int))

    def _float(self, node: Node, annotation: Any) -> Any:
        if annotation is not float:
            return self._subclass(node, annotation)
        value = node.value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise self.reject(node, "a finite number", number_remedy(node, float))

    def _text(self, node: Node, annotation: Any) -> Any:
        if annotation is not str:
            return self._subclass(node, annotation)
        node = _as_text(node)
        if isinstance(node.value, str):
            return node.value
        plain = not isinstance(node.value, (dict, tuple)) and node.value is not None
        raise self.reject(
            node, "text", "put quotes around it" if plain else value_remedy(node) or "write text"
        )

    def _subclass(self, node: Node, annotation: Any) -> Any:
        # cattrs finds StrEnum and IntEnum by their first base class.
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return self._enum(node, annotation)
        return self._unsupported(node, annotation)

    def _enum(self, node: Node, annotation: type[enum.Enum]) -> enum.Enum:
        for member in annotation:
            if type(node.value) is type(member.value) and node.value == member.value:
                return member
        choices = [member.value for member in annotation]
        raise self.reject(node, f"one of {', '.join(map(repr, choices))}", choice_remedy(node, choices))

    def _optional(self, node: Node, annotation: Any) -> Any:
        if node.value is None:
            return None
        return self.structure(node, optional_of(annotation))

    def _list(self, node: Node, annotation: Any) -> list[Any]:
        (inner,) = get_args(annotation)
        items = self._items(node)
        return self._all(items, [inner] * len(items))

    def _tuple(self, node: Node, annotation: Any) -> tuple[Any, ...]:
        inner = get_args(annotation)
        items = self._items(node)
        if len(inner) == 2 and inner[1] is ...:
            inner = (inner[0],) * len(items)
        elif len(inner) != len(items):
            raise self.reject(node, f"a list of {len(inner)} values", f"it has {len(items)}")
        return tuple(self._all(items, inner))

    def _items(self, node: Node) -> tuple[Node, ...]:
        if isinstance(node.value, tuple):
            return node.value
        raise self.reject(node, "a list", list_remedy(node))

    def _all(self, items: Sequence[Node], annotations: Sequence[Any]) -> list[Any]:
        results = []
        for item, annotation in zip(items, annotations, strict=True):
            try:
                results.append(self.structure(item, annotation))
            except Rejected:
                continue
        if len(results) < len(items):
            raise Rejected
        return results

    def _mapping(self, node: Node, annotation: Any) -> dict[Any, Any]:
        key_type, value_type = get_args(annotation)
        if not isinstance(node.value, dict):
            raise self.reject(node, "a mapping", mapping_remedy(node, _example_of(value_type)))
        results: dict[Any, Any] = {}
        skipped = self._refuse_unnamed(node, node.value, value_type)
        failed = bool(skipped)
        for name, child in node.value.items():
            if name in skipped:
                continue
            key_node = evolve(child, value=name, place=child.key_place, secret=False)
            pair = []
            for part, annotation in ((key_node, key_type), (child, value_type)):
                try:
                    pair.append(self.structure(part, annotation))
                except Rejected:
                    failed = True
            if len(pair) == 2 and pair[0] in results:
                what = f"the same as an earlier key: {brief(str(pair[0]))}"
                self.record(key_node, what, remedy="keep one of the two")
                failed = True
            elif len(pair) == 2:
                results[pair[0]] = pair[1]
        if failed:
            raise Rejected
        return results

    def _refuse_unnamed(self, node: Node, children: dict[str, Node], section: Any) -> frozenset[str]:
        """Report keys of ``section`` that stand where names of such sections are expected. What is
        returned needs no other complaint."""
        if not (isinstance(section, type) and attrs.has(section)):
            return frozenset()
        own = {attribute.name for attribute in attrs.fields(section)}
        loose = [
            name
            for name, child in children.items()
            if name in own and not isinstance(child.value, dict) and child.value is not Broken.BROKEN
        ]
        if not loose:
            return frozenset()
        empty = [name for name, child in children.items() if child.value is None and name not in own]
        first = children[loose[0]]
        self.faults.append(
            fault(
                first.key_place,
                node.path,
                f"expected names here, and below each its keys, not {', '.join(map(repr, loose))}",
                remedy=unnamed_remedy(node, loose, empty),
            )
        )
        return frozenset((*loose, *empty))

    def _unsupported(self, node: Node, annotation: Any) -> Any:
        name = getattr(annotation, "__name__", None) or str(annotation)
        self.record(
            node,
            f"its options class asks for {name}, which a configuration cannot hold",
            remedy="use bool, int, float, str, ByteSize, ByteLimit, Duration, an enum, an attrs class, "
            "tuple[...], list[...], Mapping[str, ...] or one of these with '| None'",
            kind=ErrorKind.PLUGIN,
        )
        raise Rejected


def _example_of(annotation: Any) -> str:
    """What stands for a value of a mapping in advice; empty text for a section."""
    if isinstance(annotation, type) and attrs.has(annotation):
        return ""
    text = getattr(annotation, "__supertype__", annotation) is str
    return f'"{annotation.__name__.lower()}"' if text and annotation is not str else "..."


def _as_text(node: Node) -> Node:
    """A number or a truth value that stands alone outside a file as the text that it also is: there
    quotes are a shell's affair, and it takes them away."""
    if node.written is not None and isinstance(node.value, (bool, int, float)):
        return evolve(node, value=node.written)
    return node


def _is_class(base: type) -> Callable[[Any], bool]:
    return lambda annotation: isinstance(annotation, type) and issubclass(annotation, base)


def _is_generic(*origins: type) -> Callable[[Any], bool]:
    return lambda annotation: get_origin(annotation) in origins and bool(get_args(annotation))
