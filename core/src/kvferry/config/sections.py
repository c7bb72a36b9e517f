"""A mapping into an attrs class: unknown and missing keys, validators, and plugins' own keys."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import attrs
from attrs import NOTHING, Attribute, evolve, frozen

from kvferry.api import AnySpec, ErrorKind, KVFerryError, KVFerryErrors, Retry
from kvferry.config.advice import (
    mapping_remedy,
    nearest,
    selecting_remedy,
    substitution_remedy,
    wrapped_remedy,
)
from kvferry.config.fields import Role, is_secret, role, selected_spec
from kvferry.config.hints import type_hints
from kvferry.config.nodes import (
    DEFAULT,
    ConfigPath,
    Fault,
    Node,
    dotted,
    fault,
    hidden,
)
from kvferry.config.placement import Placement
from kvferry.config.structure import Rejected, Structurer

_UNSET = object()


@frozen(kw_only=True)
class Selection:
    """A section whose ``use`` selects a plugin's spec.

    ``use`` is None where the section may leave it out and did; the caller then knows the name.
    ``keys`` are those of the section that are not core's.
    """

    path: ConfigPath
    spec: type[AnySpec]
    use: str | None
    origin: str
    keys: tuple[str, ...] = ()


class OwnKeys(enum.Enum):
    """What a resolver can say in place of an options class."""

    NOT_JUDGED = "not-judged"
    """Which keys the section takes is not known, because a plugin that may own it cannot be used and
    has a fault of its own. They are neither read nor called unknown."""


Resolver: TypeAlias = Callable[[Selection], type[Any] | OwnKeys | None]
"""Gives the options class of a selection, or None for a spec without options.

Raises :class:`kvferry.api.KVFerryError` when no spec has that name; the error gets the selection's
place unless it has one of its own.
"""


class Sections:
    """Structures sections, and asks ``resolve`` for the options class behind each selection.

    Without ``resolve`` (the first pass) plugins' own keys are left alone; ``selections`` then says
    what has to be resolved.
    """

    def __init__(self, resolve: Resolver | None) -> None:
        self.selections: list[Selection] = []
        self.placement = Placement()
        self._resolve = resolve

    def __call__(self, structurer: Structurer, node: Node, cls: type[Any]) -> Any:
        """The hook for attrs classes. Raises :class:`Rejected`."""
        if not isinstance(node.value, dict):
            short = getattr(cls, "short_spelling", None)
            if isinstance(short, str) and node.value is not None:
                raise structurer.reject(node, f"{short} or a mapping", f"write {short}")
            remedy = selecting_remedy(node) if _only_selects(cls) else ""
            raise structurer.reject(node, "a mapping", remedy or mapping_remedy(node))
        name_key = getattr(cls, "name_key", None)
        if isinstance(name_key, str):
            known = [item.name for item in attrs.fields(cls) if role(item) is Role.KEY]
            if remedy := wrapped_remedy(node.value, name_key, known):
                what = f"the keys of one entry stand beside its {name_key!r}, not below it"
                structurer.record(node, what, remedy=remedy)
                raise Rejected
        return _Section(structurer, node, node.value, cls).structure(self)

    def options_of(
        self, structurer: Structurer, selection: Selection, at: Node
    ) -> type[Any] | OwnKeys | None:
        """What the resolver says. Raises :class:`Rejected` when nothing can be said."""
        if self._resolve is None:
            self.selections.append(selection)
            raise Rejected
        try:
            options = self._resolve(selection)
        except KVFerryError as error:
            errors = error.errors if isinstance(error, KVFerryErrors) else (error,)
            structurer.faults += [Fault(at.place, _placed(each, at)) for each in errors]
            raise Rejected from None
        if isinstance(options, OwnKeys) or options is None:
            return options
        if not (isinstance(options, type) and attrs.has(options)):
            what = f"the options of {selection.use!r} are not an attrs class: {options!r}"
            structurer.record(at, what, kind=ErrorKind.PLUGIN)
            raise Rejected
        return options


class _Section:
    """One mapping on its way into one class."""

    def __init__(
        self, structurer: Structurer, node: Node, children: Mapping[str, Node], cls: type[Any]
    ) -> None:
        self._structurer = structurer
        self._node = node
        self._children = children
        self._cls = cls
        self._values: dict[str, Any] = {}
        self._failed = False

    def structure(self, sections: Sections) -> Any:
        fields: tuple[Attribute[Any], ...] = attrs.fields(self._cls)
        try:
            hints = type_hints(self._cls)
        except (NameError, TypeError) as error:
            what = f"the annotations of {self._cls.__qualname__} cannot be read"
            self._structurer.record(self._node, what, why=str(error), kind=ErrorKind.PLUGIN)
            raise Rejected from None
        keys = {item.name: item for item in fields if role(item) is Role.KEY}
        self._placement = sections.placement
        self._placement.takes(self._node.path, keys)
        for name, attribute in keys.items():
            self._read(attribute, hints[name])
        own = next((item for item in fields if role(item) is Role.OWN_KEYS), None)
        if own is None:
            self._refuse_unknown(keys)
        else:
            self._read_own(sections, own, keys)
        for attribute in fields:
            if role(attribute) is Role.ORIGIN:
                self._values[attribute.name] = str(self._node.place)
        return self._construct(fields)

    def _read(self, attribute: Attribute[Any], hint: Any) -> None:
        child = self._children.get(attribute.name)
        if child is None:
            if attribute.default is NOTHING:
                if self._node.complete:
                    self._missing(attribute)
                self._failed = True
                return
            if not _takes_own_keys(hint):
                return
            # A section left out still selects a plugin, whose options class has the defaults.
            child = Node({}, DEFAULT, DEFAULT, (*self._node.path, attribute.name))
        elif is_secret(attribute):
            child = hidden(child)
        try:
            self._values[attribute.name] = self._structurer.structure(child, hint)
        except Rejected:
            self._failed = True

    def _read_own(self, sections: Sections, own: Attribute[Any], keys: Mapping[str, Attribute[Any]]) -> None:
        default = keys["use"].default
        use = self._values.get("use", _UNSET if "use" in self._children else default)
        if use is _UNSET or use is NOTHING:
            self._refuse_misspelt(keys)
            return
        at = self._children.get("use", self._node)
        selection = Selection(
            path=self._node.path,
            spec=selected_spec(own),
            use=use,
            origin=str(at.place),
            keys=tuple(key for key in self._children if key not in keys),
        )
        try:
            options = sections.options_of(self._structurer, selection, at)
        except Rejected:
            self._failed = True
            self._refuse_misspelt(keys)
            return
        if options is None:
            if use is None:
                self._refuse_ownerless(keys)
            else:
                self._refuse_unknown(keys)
            return
        if isinstance(options, OwnKeys):
            self._refuse_misspelt(keys)
            return
        theirs = {item.name: item for item in attrs.fields(options) if role(item) is Role.KEY}
        for what in clashing_keys(self._cls, options):
            self._structurer.record(at, what, kind=ErrorKind.PLUGIN)
            self._failed = True
        self._placement.takes(self._node.path, theirs)
        self._refuse_unknown([*keys, *theirs])
        mine = {name: child for name, child in self._children.items() if name in theirs}
        try:
            self._values[own.name] = self._structurer.structure(evolve(self._node, value=mine), options)
        except Rejected:
            self._failed = True

    def _missing(self, attribute: Attribute[Any]) -> None:
        doc = attribute.metadata.get("doc", "")
        path = dotted((*self._node.path, attribute.name))
        self._structurer.faults.append(
            fault(
                self._node.key_place,
                self._node.path,
                f"{attribute.name!r} is missing",
                remedy=f"set {path}: {doc}" if doc else f"set {path}",
            )
        )

    def _refuse_misspelt(self, keys: Mapping[str, Attribute[Any]]) -> None:
        """Report what must be a core key misspelt, while the plugin's own keys are not known."""
        missing = [
            name for name, item in keys.items() if name not in self._children and item.default is NOTHING
        ]
        others = [key for key in self._children if key not in keys]
        meant = {key: near for key in others if (near := nearest(key, missing))}
        self._refuse_unknown([*keys, *(key for key in others if key not in meant)])

    def _refuse_ownerless(self, keys: Mapping[str, Attribute[Any]]) -> None:
        """Report keys in a section that selects no plugin to own them, unless a core key was misspelt."""
        others = [key for key in self._children if key not in keys]
        ownerless = [key for key in others if not nearest(key, keys)]
        self._refuse_unknown([*keys, *ownerless])
        if not ownerless or len(ownerless) < len(others):
            return
        self._failed = True
        listed = ", ".join(dotted((key,)) for key in ownerless)
        doc = keys["use"].metadata.get("doc", "")
        self._structurer.faults.append(
            fault(
                self._children[ownerless[0]].key_place,
                self._node.path,
                f"'use' is missing, and what it selects would own these keys: {listed}",
                remedy=f"set {dotted((*self._node.path, 'use'))}: {doc}; or remove the keys",
            )
        )

    def _refuse_unknown(self, known: Iterable[str]) -> None:
        names = list(known)
        for key, child in self._children.items():
            if key in names:
                continue
            self._failed = True
            self._placement.refuse(child, names)

    def _construct(self, fields: tuple[Attribute[Any], ...]) -> Any:
        error: Exception | None = None
        if not self._failed:
            aliases = {item.name: item.alias or item.name for item in fields}
            try:
                return self._cls(**{aliases[name]: value for name, value in self._values.items()})
            except (ValueError, TypeError) as caught:
                error = caught
        # Construction stops at the first validator that objects, so each is asked by itself.
        found = [self._validate(attribute) for attribute in fields if attribute.validator]
        if error is not None and not any(found):
            self._structurer.record(self._node, _sentence(error))
        raise Rejected

    def _validate(self, attribute: Attribute[Any]) -> bool:
        """Whether the field's own validator objects; if so, that is recorded."""
        if attribute.name not in self._values or attribute.validator is None:
            return False
        partial = object.__new__(self._cls)
        for name, value in self._values.items():
            object.__setattr__(partial, name, value)
        try:
            attribute.validator(partial, attribute, self._values[attribute.name])
        except (ValueError, TypeError) as error:
            at = self._children.get(attribute.name, self._node)
            secret = at.secret or is_secret(attribute)
            what = "this value is not acceptable" if secret else _sentence(error)
            remedy = substitution_remedy(at) or getattr(error, "remedy", "")
            path = (*self._node.path, attribute.name)
            self._structurer.faults.append(fault(at.place, path, what, remedy=remedy))
            return True
        except AttributeError:
            # It looks at a field that has no value yet, whose own fault is recorded.
            return False
        return False


def clashing_keys(section: type[Any], options: type[Any]) -> Iterator[str]:
    """One sentence for each key of a plugin's options that is core's own key in this section."""
    core, theirs = (
        {item.name for item in attrs.fields(cls) if role(item) is Role.KEY} for cls in (section, options)
    )
    for name in sorted(core & theirs):
        yield f"{options.__qualname__} declares {name!r}, which is core's own key here"


def _takes_own_keys(hint: Any) -> bool:
    if not (isinstance(hint, type) and attrs.has(hint)):
        return False
    return any(role(item) is Role.OWN_KEYS for item in attrs.fields(hint))


def _only_selects(cls: type[Any]) -> bool:
    """Whether the class has keys of a plugin, and of core's none but ``use``."""
    keys = [item.name for item in attrs.fields(cls) if role(item) is Role.KEY]
    return keys == ["use"] and _takes_own_keys(cls)


def _placed(error: KVFerryError, at: Node) -> KVFerryError:
    if error.where:
        return error
    return KVFerryError(
        f"{dotted(at.path)}: {error.what}",
        kind=error.kind,
        where=str(at.place),
        why=error.why,
        remedy=error.remedy,
        retry=Retry.AFTER_CHANGE,
    )


def _sentence(error: Exception) -> str:
    # attrs' own validators put the attribute and the value behind the sentence.
    return str(error.args[0]) if error.args else type(error).__name__
