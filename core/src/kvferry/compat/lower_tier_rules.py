"""CORE007 to CORE013: what must hold for the tiers below the first, and between them and the first."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.api import Check, Example, Known, Rule, Severity
from kvferry.api.units import round_up
from kvferry.compat.tier_rules import IS_FIRST, IS_LOWER, SUPPORTED_ENGINE, WITH_ENGINE, lower_tier

IN_FLIGHT_SHARE = 0.25
"""Copies under way hold slots of the first tier that then keep no hits."""

_GIB = 1 << 30
_MIB = 1 << 20
_PAGE = 4096
_FRONT_CAPACITY = "tiers.*[place.front].capacity"
_CHUNK = "engine.chunk_bytes"
_WITH_CHUNKS = (Known(_CHUNK) | WITH_ENGINE) & SUPPORTED_ENGINE & IS_LOWER


def least_slot_bytes(chunk: int) -> int:
    """What one chunk takes at the least in a lower tier: whole pages, and one for its header."""
    return round_up(chunk, _PAGE) + _PAGE


def _sizes(front: int, lower: int, store: str = "write_through") -> Mapping[str, object]:
    return lower_tier(**{"tiers.cpu.capacity": front, "tiers.far.capacity": lower, "tiers.far.store": store})


def _in_flight(front: int, in_flight: int) -> Mapping[str, object]:
    return lower_tier(**{"tiers.cpu.capacity": front, "tiers.far.in_flight": in_flight})


def _chunks(chunk: int, **facts: object) -> Mapping[str, object]:
    return lower_tier(**{"engine.group_kinds": ("full",), _CHUNK: chunk, **facts})


def _takes(most: int | None) -> dict[str, object]:
    return {"tiers.far.use": "files", "tiers.far.capabilities.max_value_bytes": most}


def _first(*idle: str) -> Mapping[str, object]:
    return {"tiers.cpu.place.front": True, "tiers.cpu.place.idle_keys": idle}


LOWER_TIER_RULES = (
    Rule(
        id="CORE007",
        severity=Severity.WARNING,
        each="tiers",
        when=IS_LOWER
        & Check("tiers.*.store is write_through", ("tiers.*.store",), lambda store: store == "write_through"),
        require=Check(
            "tiers.*.capacity >= capacity of the first tier",
            ("tiers.*.capacity", _FRONT_CAPACITY),
            lambda capacity, fronts: all(capacity >= front for front in fronts),
        ),
        requires=("CORE005",),
        message=f"the tier holds {{tiers.*.capacity:size}}, less than the {{{_FRONT_CAPACITY}:size}} of "
        "memory above it, and gets every chunk of it: almost no hit would come from here",
        fix="give it several times the capacity of the first tier, or set  store: write_on_evict",
        source="design",
        examples=(
            Example(facts=_sizes(16 * _GIB, 200 * _GIB), passes=True),
            Example(facts=_sizes(16 * _GIB, 8 * _GIB, "write_on_evict"), passes=True),
            Example(facts=_sizes(16 * _GIB, 8 * _GIB), passes=False),
        ),
    ),
    Rule(
        id="CORE008",
        severity=Severity.WARNING,
        each="tiers",
        when=IS_FIRST,
        require=Check(
            "no key of lower tiers is set on the first",
            ("tiers.*.place.idle_keys",),
            lambda idle: len(idle) == 0,
        ),
        requires=("CORE003",),
        message="these keys are about tiers behind the first and have no effect on it: "
        "{tiers.*.place.idle_keys}",
        fix="remove them here, or set them on the tier that they are meant for",
        source="design",
        examples=(
            Example(facts=_first(), passes=True),
            Example(facts=_first("store", "in_flight"), passes=False),
        ),
    ),
    Rule(
        id="CORE009",
        severity=Severity.WARNING,
        each="tiers",
        when=IS_LOWER,
        require=Check(
            f"tiers.*.in_flight <= {IN_FLIGHT_SHARE:g} x capacity of the first tier",
            ("tiers.*.in_flight", _FRONT_CAPACITY),
            lambda most, fronts: all(most <= IN_FLIGHT_SHARE * front for front in fronts),
        ),
        requires=("CORE005",),
        message=f"copies to this tier may hold {{tiers.*.in_flight:size}} of the first tier's "
        f"{{{_FRONT_CAPACITY}:size}}, and loads from it as much again: they could push out what would be hit",
        fix="lower in_flight to a quarter of the first tier's capacity or less, or raise that capacity",
        source="design",
        examples=(
            Example(facts=_in_flight(16 * _GIB, 256 * _MIB), passes=True),
            Example(facts=_in_flight(_GIB, 512 * _MIB), passes=False),
        ),
    ),
    Rule(
        id="CORE010",
        severity=Severity.ERROR,
        each="tiers",
        when=_WITH_CHUNKS,
        require=Check(
            "tiers.*.in_flight >= engine.chunk_bytes",
            ("tiers.*.in_flight", _CHUNK),
            lambda most, chunk: bool(most >= chunk),
        ),
        requires=("CORE005",),
        message="in_flight is {tiers.*.in_flight:size}, less than one chunk of {engine.chunk_bytes:size}, so "
        "not a single chunk may be on its way to this tier or from it",
        fix="raise in_flight to several chunks, or lower chunk_tokens",
        source="design",
        examples=(
            Example(facts=_chunks(4 * _MIB, **{"tiers.far.in_flight": 256 * _MIB}), passes=True),
            Example(facts=_chunks(4 * _MIB, **{"tiers.far.in_flight": _MIB}), passes=False),
        ),
    ),
    Rule(
        id="CORE011",
        severity=Severity.ERROR,
        each="tiers",
        when=_WITH_CHUNKS,
        require=Check(
            "tiers.*.capacity >= engine.chunk_bytes in whole pages and a header",
            ("tiers.*.capacity", _CHUNK),
            lambda capacity, chunk: bool(capacity >= least_slot_bytes(chunk)),
        ),
        requires=("CORE004", "CORE005"),
        message="the tier holds {tiers.*.capacity:size}, which leaves no room for the header of one chunk of "
        "{engine.chunk_bytes:size}, so it could never keep anything",
        fix="give the tier a capacity of many chunks, or lower chunk_tokens",
        source="design",
        examples=(
            Example(facts=_chunks(4 * _MIB, **{"tiers.far.capacity": 200 * _GIB}), passes=True),
            Example(facts=_chunks(4 * _MIB, **{"tiers.far.capacity": 4 * _MIB}), passes=False),
        ),
    ),
    Rule(
        id="CORE012",
        severity=Severity.ERROR,
        each="tiers",
        when=_WITH_CHUNKS,
        require=Check(
            "tiers.*.capabilities.max_value_bytes is not set or >= engine.chunk_bytes",
            ("tiers.*.capabilities.max_value_bytes", "tiers.*.use", _CHUNK),
            lambda most, _use, chunk: most is None or bool(most >= chunk),
        ),
        requires=("CORE005",),
        message="the backend {tiers.*.use} takes {tiers.*.capabilities.max_value_bytes:size} at most, and "
        "one chunk has {engine.chunk_bytes:size}, so it could never keep anything",
        fix="lower chunk_tokens, or use another backend for this tier",
        source="design",
        examples=(
            Example(facts=_chunks(4 * _MIB, **_takes(None)), passes=True),
            Example(facts=_chunks(4 * _MIB, **_takes(4 * _MIB)), passes=True),
            Example(facts=_chunks(4 * _MIB, **_takes(_MIB)), passes=False),
        ),
    ),
    Rule(
        id="CORE013",
        severity=Severity.WARNING,
        each="tiers",
        when=IS_LOWER,
        require=Check(
            "no key of the first tier is set on another",
            ("tiers.*.place.idle_keys",),
            lambda idle: len(idle) == 0,
        ),
        requires=("CORE005",),
        message="these keys are about the first tier and have no effect on others: {tiers.*.place.idle_keys}",
        fix="remove them here, or set them on the first tier",
        source="design",
        examples=(
            Example(facts=lower_tier(**{"tiers.far.place.idle_keys": ()}), passes=True),
            Example(facts=lower_tier(**{"tiers.far.place.idle_keys": ("max_pinned",)}), passes=False),
        ),
    ),
)
