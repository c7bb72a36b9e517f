"""What an attrs class says about its fields beyond their types, and validators with clear words."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from attrs import NOTHING, Attribute, field, frozen

from kvferry.api import AnySpec
from kvferry.api.units import ByteLimit, ByteSize, Duration, parse_duration, parse_limit, parse_size

_ROLE = "kvferry.role"
_SPEC = "kvferry.spec"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

MAX_SOCKET_FOLDER_BYTES = 64
"""What a Unix socket's path has left (107 bytes, unix(7)) for the folder in which the instances of this
host meet, once their own part of the path is taken off."""


class Role(enum.Enum):
    """What a field is for."""

    KEY = "key"
    """A key of the configuration; every field without another role."""
    OWN_KEYS = "own-keys"
    """Takes the keys of its section that belong to the selected plugin, structured."""
    ORIGIN = "origin"
    """Filled with the place of the section."""
    COMPUTED = "computed"
    """Not configured."""


def own_keys(spec: type[AnySpec]) -> Any:
    """Field for the keys of the plugin that the section's ``use`` selects by a spec of this kind."""
    return field(default=None, metadata={_ROLE: Role.OWN_KEYS, _SPEC: spec})


def origin() -> Any:
    """Field that remembers where its section stands; not part of equality."""
    return field(default="default", eq=False, metadata={_ROLE: Role.ORIGIN})


def computed(default: Any) -> Any:
    """Field that no source can set; not part of equality."""
    return field(default=default, eq=False, repr=False, metadata={_ROLE: Role.COMPUTED})


def role(attribute: Attribute[Any]) -> Role:
    """The role of an attrs field."""
    found = attribute.metadata.get(_ROLE, Role.KEY if attribute.init else Role.COMPUTED)
    assert isinstance(found, Role)
    return found


def selected_spec(attribute: Attribute[Any]) -> type[AnySpec]:
    """The kind of spec that an ``own_keys`` field waits for."""
    spec: type[AnySpec] = attribute.metadata[_SPEC]
    return spec


def is_secret(attribute: Attribute[Any]) -> bool:
    """Whether the field's value must not be shown."""
    return bool(attribute.metadata.get("secret"))


class Unacceptable(ValueError):
    """What a validator says of a value, with what the user can do. Any ``ValueError`` will do as well;
    then the report has no remedy."""

    def __init__(self, what: str, *, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


def positive(_instance: object, attribute: Attribute[Any], value: float) -> None:
    """Validator: above zero."""
    if value <= 0:
        raise Unacceptable("must be above zero", remedy=_or_nothing("write a larger value", attribute))


def not_negative(_instance: object, attribute: Attribute[Any], value: float) -> None:
    """Validator: zero or above."""
    if value < 0:
        raise Unacceptable("must not be below zero", remedy=_or_nothing("write 0 or more", attribute))


def share(_instance: object, attribute: Attribute[Any], value: float) -> None:
    """Validator: from 0 to 1."""
    if not 0 <= value <= 1:
        percent = f"write {value / 100:g}" if 1 < value <= 100 else "write a part of one, such as 0.5"
        raise Unacceptable("must be from 0 to 1", remedy=_or_nothing(percent, attribute))


def not_blank(_instance: object, attribute: Attribute[Any], value: str | None) -> None:
    """Validator: None, or text with something to read in it."""
    if value is not None and not value.strip():
        raise Unacceptable("must not be empty", remedy=_or_nothing("give it a value", attribute))


def plain_name(_instance: object, attribute: Attribute[Any], value: str | None) -> None:
    """Validator: None, or a name that can stand in addresses, labels and tables as it is."""
    not_blank(_instance, attribute, value)
    if value is not None and _PLAIN_NAME.fullmatch(value) is None:
        raise Unacceptable(
            "must be at most 64 of A-Z, a-z, 0-9, '.', '_' and '-', a letter or digit first",
            remedy="rename it, for example decode-1",
        )


def socket_folder(_instance: object, attribute: Attribute[Any], value: str | None) -> None:
    """Validator: None, or the whole path of a folder below which a socket's path is not too long."""
    not_blank(_instance, attribute, value)
    if value is None:
        return
    if not value.startswith("/"):
        # Every process of an engine must find the same folder, and each may run somewhere else.
        raise Unacceptable("must be a whole path", remedy="begin it with '/'")
    if len(os.fsencode(value.rstrip("/"))) > MAX_SOCKET_FOLDER_BYTES:
        raise Unacceptable(
            f"must be at most {MAX_SOCKET_FOLDER_BYTES} bytes long, because a socket's path has an end",
            remedy="name a folder nearer to the root",
        )


def _or_nothing(remedy: str, attribute: Attribute[Any]) -> str:
    return remedy if attribute.default is NOTHING else f"{remedy}, or remove the key"


@frozen(kw_only=True)
class TextKind:
    """A ``NewType`` whose values are written as text of a certain form.

    ``parse`` raises ``ValueError`` with a sentence for the user.
    """

    parse: Callable[[str], Any]
    expected: str
    """For ``expected ..., not ...`` when the value is not even text."""
    remedy: str


TextKinds: TypeAlias = Mapping[Any, TextKind]
"""By ``NewType``, which has no type of its own that a checker would accept here."""

UNIT_KINDS: TextKinds = {
    ByteSize: TextKind(
        parse=parse_size,
        expected="a size with a unit",
        remedy="write a number and a unit, such as 16GiB (1024-based) or 16GB (1000-based)",
    ),
    ByteLimit: TextKind(
        parse=parse_limit,
        expected="a size with a unit, or unlimited",
        remedy="write a number and a unit, such as 16GiB, 0B for nothing, or the word unlimited",
    ),
    Duration: TextKind(
        parse=parse_duration,
        expected="a duration with a unit",
        remedy="write a number and a unit, such as 250ms, 30s, 5min or 2h",
    ),
}
