"""Sizes and durations: plain numbers in the program, a number with a unit in the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import NewType

ByteSize = NewType("ByteSize", int)
"""Bytes, from zero to 2**63 - 1. Written with a unit: ``16GiB`` (1024-based), ``16GB`` (1000-based)."""

Duration = NewType("Duration", float)
"""Seconds, never negative. Written with a unit: ``250ms``, ``30s``, ``5min``, ``2h``."""

LARGEST_SIZE = 2**63 - 1

ByteLimit = NewType("ByteLimit", int)
"""A most number of bytes, or :data:`UNLIMITED`. Written as a size, or as the word ``unlimited``."""

UNLIMITED = ByteLimit(LARGEST_SIZE)

_UNLIMITED_WORD = "unlimited"

# Order matters to format_size: the first unit that divides a size exactly is the one shown.
_SIZE_UNITS: Mapping[str, Decimal] = {
    "PiB": Decimal(2**50),
    "PB": Decimal(10**15),
    "TiB": Decimal(2**40),
    "TB": Decimal(10**12),
    "GiB": Decimal(2**30),
    "GB": Decimal(10**9),
    "MiB": Decimal(2**20),
    "MB": Decimal(10**6),
    "KiB": Decimal(2**10),
    "kB": Decimal(10**3),
    "KB": Decimal(10**3),
    "B": Decimal(1),
}
_TIME_UNITS: Mapping[str, Decimal] = {
    "h": Decimal(3600),
    "min": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
    "us": Decimal("0.000001"),
}
# Digits are bounded so that no text, however long, costs more than a glance.
_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,40})?) *([A-Za-z]*)")


def round_up(number: int, unit: int) -> int:
    """The least multiple of ``unit`` that is not below ``number``."""
    return -(-number // unit) * unit


def parse_size(text: str) -> ByteSize:
    """Bytes meant by ``text``. Raises ``ValueError`` with a sentence fit for the user."""
    amount = _parse(text, _SIZE_UNITS, "a size")
    if amount != amount.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number of bytes")
    if amount > LARGEST_SIZE:
        raise ValueError(f"{text!r} is more than any machine holds")
    return ByteSize(int(amount))


def parse_limit(text: str) -> ByteLimit:
    """The limit meant by ``text``. Raises ``ValueError`` with a sentence fit for the user."""
    if text.strip(" ") == _UNLIMITED_WORD:
        return UNLIMITED
    return ByteLimit(parse_size(text))


def parse_duration(text: str) -> Duration:
    """Seconds meant by ``text``. Raises ``ValueError`` with a sentence fit for the user."""
    return Duration(float(_parse(text, _TIME_UNITS, "a duration")))


def format_size(size: int) -> str:
    """The shortest exact way to write ``size``; :func:`parse_size` reads it back."""
    return _format(Decimal(size), _SIZE_UNITS) if size else "0B"


def format_limit(limit: int) -> str:
    """The shortest exact way to write ``limit``; :func:`parse_limit` reads it back."""
    return _UNLIMITED_WORD if limit == UNLIMITED else format_size(limit)


def format_duration(seconds: float) -> str:
    """An exact way to write ``seconds``; :func:`parse_duration` reads it back."""
    return _format(Decimal(repr(seconds)), _TIME_UNITS) if seconds else "0s"


def _parse(text: str, units: Mapping[str, Decimal], what: str) -> Decimal:
    stripped = text.strip(" ")
    match = _QUANTITY.fullmatch(stripped)
    if match is None:
        if _QUANTITY.fullmatch(stripped.removeprefix("-")):
            raise ValueError(f"{what} cannot be negative: {_brief(text)}")
        raise ValueError(f"{_brief(text)} is not {what}")
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"{what} needs a unit: {_brief(text)}")
    if unit not in units:
        near = [known for known in units if known.casefold() == unit.casefold()]
        hint = f"did you mean {near[0]!r}" if near else "known are " + ", ".join(reversed(list(units)))
        raise ValueError(f"unknown unit {_brief(unit)} in {_brief(text)}; {hint}")
    return Decimal(number) * units[unit]


def _format(amount: Decimal, units: Mapping[str, Decimal]) -> str:
    fitting = [
        f"{int(amount / factor)}{unit}"
        for unit, factor in units.items()
        if amount >= factor and amount % factor == 0
    ]
    if fitting:
        return min(fitting, key=len)
    return f"{amount:f}s"


def _brief(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
