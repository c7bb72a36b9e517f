"""Every key that a configuration can hold, read off the classes that structure it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, get_args, get_origin

import attrs
from attrs import NOTHING, Attribute, frozen

from kvferry.api import AnySpec, FactKind, FactSource, FactSpec
from kvferry.api.units import ByteLimit, ByteSize, Duration, format_duration, format_limit, format_size
from kvferry.config.fields import Role, is_secret, role, selected_spec
from kvferry.config.hints import optional_of, type_hints
from kvferry.config.nodes import VARIABLE_PREFIX
from kvferry.config.schema import Config, Reason, RuleId, TierName

NOT_SET = "not set"


@frozen(kw_only=True)
class ConfigKey:
    """One key. In ``path`` a ``*`` stands for a name that the user gives, or for the items of a list.

    ``type`` is in words, the unit of a quantity included; ``default`` is as YAML would say it, and
    ``None`` for a key that must be set; ``choices`` are the words of an enumeration.
    """

    path: str
    type: str
    default: str | None
    doc: str
    choices: tuple[str, ...] = ()
    secret: bool = False
    in_list: bool = False
    kind: FactKind = FactKind.TEXT

    @property
    def variable(self) -> str:
        """The environment variable, with ``<NAME>`` for each name; empty for a key inside a list,
        which can only be set with its whole list."""
        if self.in_list:
            return ""
        parts = ("<NAME>" if part == "*" else part.upper() for part in self.path.split("."))
        return VARIABLE_PREFIX + "__".join(parts)

    def as_fact(self) -> FactSpec:
        """The key as rules read it."""
        return FactSpec(
            path=self.path,
            kind=self.kind,
            meaning=self.doc or "a key of the configuration",
            source=FactSource.CONFIGURATION,
        )


def core_keys() -> tuple[ConfigKey, ...]:
    """The keys that core itself understands, in the order of the schema."""
    return tuple(_keys(Config, ""))


def option_keys(options: type[Any], section: str) -> tuple[ConfigKey, ...]:
    """The keys of a plugin's options class below ``section``, such as ``tiers.*``."""
    return tuple(_keys(options, section))


def option_sections() -> Mapping[type[AnySpec], str]:
    """For each kind of spec that a configuration can select, the section that holds its own keys."""
    return MappingProxyType(dict(_option_sections(Config, "")))


def _option_sections(cls: type[Any], path: str) -> Iterator[tuple[type[AnySpec], str]]:
    hints = type_hints(cls)
    for attribute in attrs.fields(cls):
        if role(attribute) is Role.OWN_KEYS:
            yield selected_spec(attribute), path
        elif role(attribute) is Role.KEY:
            below = _section(hints[attribute.name])
            if below is not None:
                yield from _option_sections(below[0], _join(path, attribute.name + below[1]))


def _keys(cls: type[Any], path: str, *, in_list: bool = False) -> Iterator[ConfigKey]:
    hints = type_hints(cls)
    for attribute in attrs.fields(cls):
        if role(attribute) is not Role.KEY:
            continue
        hint = hints[attribute.name]
        below = _section(hint)
        here = _join(path, attribute.name)
        # A section by itself is told by the keys in it; one with names or items has a default.
        if below is None or below[1]:
            yield _key(attribute, hint, here, in_list=in_list)
        if below is not None:
            inner, star = below
            listed = in_list or get_origin(hint) in (tuple, list)
            yield from _keys(inner, here + star, in_list=listed)


def _key(attribute: Attribute[Any], hint: Any, path: str, *, in_list: bool) -> ConfigKey:
    inner = optional_of(hint) or hint
    choices = tuple(str(member.value) for member in inner) if _is_enum(inner) else ()
    return ConfigKey(
        path=path,
        type=_type_text(inner),
        default=_default(attribute, inner),
        doc=attribute.metadata.get("doc", ""),
        choices=choices,
        secret=is_secret(attribute),
        in_list=in_list,
        kind=_fact_kind(inner),
    )


def _section(hint: Any) -> tuple[type[Any], str] | None:
    """The class of the keys below, and ``.*`` when names or items come between; None for a value."""
    inner = optional_of(hint) or hint
    if isinstance(inner, type) and attrs.has(inner):
        return inner, ""
    arguments = [item for item in get_args(inner) if item is not ...]
    if arguments and isinstance(arguments[-1], type) and attrs.has(arguments[-1]):
        return arguments[-1], ".*"
    return None


def _default(attribute: Attribute[Any], hint: Any) -> str | None:
    default: Any = attribute.default
    if default is NOTHING:
        return None
    return _yaml(getattr(default, "factory", lambda: default)(), hint)


def _yaml(value: Any, hint: Any) -> str:
    if value is None:
        return NOT_SET
    if hint in _FORMATS:
        return _FORMATS[hint](value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, Mapping):
        inner = get_args(hint)[-1]
        return "{" + ", ".join(f"{key}: {_yaml(item, inner)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        inner = next(iter(get_args(hint)), str)
        return "[" + ", ".join(_yaml(item, inner) for item in value) + "]"
    return str(value) or '""'


def _type_text(hint: Any) -> str:
    hint = optional_of(hint) or hint
    if hint in _TYPE_TEXTS:
        return _TYPE_TEXTS[hint]
    if _is_enum(hint):
        return "one of " + ", ".join(str(member.value) for member in hint)
    if isinstance(hint, type) and attrs.has(hint):
        return "section"
    arguments = [item for item in get_args(hint) if item is not ...]
    if get_origin(hint) in (tuple, list):
        return f"list of {_plural(_type_text(arguments[0]))}" if len(set(arguments)) == 1 else "list"
    if len(arguments) == 2:
        return f"mapping of {_plural(_type_text(arguments[0]))} to {_plural(_type_text(arguments[1]))}"
    return getattr(hint, "__name__", str(hint))


def _plural(text: str) -> str:
    return f"{text}s" if text.rpartition(" ")[2] in _COUNTABLE else text


def _fact_kind(hint: Any) -> FactKind:
    if get_origin(hint) in (tuple, list):
        return FactKind.TEXTS
    if get_origin(hint) in (Mapping, dict):
        return FactKind.MAPPING
    return _FACT_KINDS.get(hint, FactKind.TEXT)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_FORMATS: Mapping[Any, Callable[[Any], str]] = {
    ByteSize: format_size,
    ByteLimit: format_limit,
    Duration: format_duration,
}
_TYPE_TEXTS: Mapping[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    ByteSize: "size",
    ByteLimit: "size or unlimited",
    Duration: "duration",
    TierName: "tier name",
    RuleId: "rule id",
    Reason: "reason",
}
_COUNTABLE = frozenset({"number", "text", "size", "duration", "name", "id", "reason", "section"})
_FACT_KINDS: Mapping[Any, FactKind] = {
    bool: FactKind.FLAG,
    int: FactKind.COUNT,
    float: FactKind.NUMBER,
    ByteSize: FactKind.SIZE,
    ByteLimit: FactKind.SIZE,
    Duration: FactKind.DURATION,
}
