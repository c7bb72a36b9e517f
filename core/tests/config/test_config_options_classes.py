"""An options class is judged as a configuration would judge it, before there is one."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import attrs
import pytest
from attrs import frozen

from kvferry.api import (
    BackendSpec,
    ByteLimit,
    ByteSize,
    ChannelSpec,
    ConnectorSpec,
    Duration,
    EvictionSpec,
    KVFerryError,
    KVFerryErrors,
    LookupSpec,
)
from kvferry.config import ConfigSources, read_core
from kvferry.config.optioncheck import options_faults


class Mode(enum.StrEnum):
    FAST = "fast"


class Level(enum.IntEnum):
    LOW = 1


class Count(int):
    pass


@frozen(kw_only=True)
class Inner:
    size: ByteSize


@frozen(kw_only=True)
class Raw:
    data: bytes


@frozen(kw_only=True)
class Tree:
    branches: tuple[Tree, ...] = ()


HELD: list[tuple[Any, Any]] = [
    (bool, True),
    (int, 3),
    (float, 0.5),
    (str, "text"),
    (ByteSize, "16GiB"),
    (ByteLimit, "unlimited"),
    (Duration, "500ms"),
    (Mode, "fast"),
    (Level, 1),
    (Inner, {"size": "1KiB"}),
    (Tree, {"branches": [{}]}),
    (list[int], [1]),
    (tuple[Mode, ...], ["fast"]),
    (tuple[int, str], [1, "a"]),
    (Sequence[Inner], [{"size": "1KiB"}]),
    (Mapping[str, Duration], {"a": "1s"}),
    (dict[str, int], {"a": 1}),
    (int | None, None),
    (Optional[Mode], "fast"),  # noqa: UP045 - the other spelling of the same
]
NOT_HELD: list[tuple[Any, Any]] = [
    (Literal["off", "on"], "on"),
    (int | str, 1),
    (Any, 1),
    (bytes, "a"),
    (Path, "/tmp"),
    (datetime.timedelta, 1),
    (Count, 1),
    (list, [1]),
    (set[int], [1]),
    (Mapping, {"a": 1}),
    (list[bytes], ["a"]),
    (tuple[int, Path], [1, "a"]),
    (Mapping[str, Literal[1]], {"a": 1}),
    (Path | None, "a"),
    (Raw, {"data": "a"}),
    (tuple[Raw, ...], [{"data": "a"}]),
]


def as_a_configuration_says(options: type[Any], value: Any) -> bool:
    """Whether a configuration with this value of the field ``item`` is read."""
    tier = {"use": "any", "capacity": "1GiB", "item": value}
    overrides = {"kvferry": {"tiers": {"cpu": tier}}}
    raw = read_core(ConfigSources(file=None, environment={}, overrides=overrides))
    faults: tuple[KVFerryError, ...] = ()
    try:
        raw.structure(lambda selection: options if selection.spec is BackendSpec else None)
    except KVFerryErrors as errors:
        faults = errors.errors
    assert all("which a configuration cannot hold" in fault.what for fault in faults)
    return not faults


@pytest.mark.parametrize(("annotation", "value"), [*HELD, *NOT_HELD], ids=str)
def test_both_take_and_refuse_the_same_types(annotation: Any, value: Any) -> None:
    options = attrs.make_class("Options", {"item": attrs.field(type=annotation)}, frozen=True)
    held = (annotation, value) in HELD
    assert as_a_configuration_says(options, value) is held
    faults = options_faults(options, BackendSpec)
    assert [bool(fault.remedy) for fault in faults] == ([] if held else [True])
    assert all(fault.what.startswith("Options.item") for fault in faults)


def test_names_that_are_core_s_are_refused_where_they_are_core_s() -> None:
    options = attrs.make_class("Options", {"capacity": attrs.field(type=int), "use": attrs.field(type=str)})
    told = [fault.what for fault in options_faults(options, BackendSpec)]
    assert told == [
        "Options: Options declares 'capacity', which is core's own key here",
        "Options: Options declares 'use', which is core's own key here",
    ]
    for spec in (EvictionSpec, ConnectorSpec, ChannelSpec, LookupSpec):
        assert len(options_faults(options, spec)) == 1, "capacity is a key of tiers alone"


def test_an_annotation_that_names_nothing_is_told() -> None:
    options = attrs.make_class("Options", {"item": attrs.field(type="Nowhere")})
    (fault,) = options_faults(options, BackendSpec)
    assert "the annotations of Options cannot be read" in fault.what
    assert "Nowhere" in fault.why
