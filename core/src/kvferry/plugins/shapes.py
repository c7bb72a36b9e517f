"""What core does with the object of each spec: how it is built, and which methods it must have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from attrs import frozen

from kvferry.api import (
    AddressableBackend,
    AnySpec,
    Backend,
    BackendSpec,
    Channel,
    ChannelSpec,
    Command,
    CommandSpec,
    DeviceSpec,
    EvictionPolicy,
    EvictionSpec,
    LookupSpec,
    PeerCarrier,
    QuotaPolicy,
    SourceSpec,
    Staging,
    StagingSpec,
)


@frozen(kw_only=True)
class Shape:
    """``arguments`` are what the factory is called with, by position; ``None`` while core does not
    build such objects yet. ``protocol`` is the contract of the object, ``None`` while there is none."""

    arguments: tuple[str, ...] | None
    protocol: type | None

    def methods(self) -> Mapping[str, FunctionType]:
        """The functions of the contract by name, those of its base contracts first."""
        found: dict[str, FunctionType] = {}
        for base in reversed(self.protocol.__mro__ if self.protocol is not None else ()):
            found |= {
                name: value
                for name, value in vars(base).items()
                if isinstance(value, FunctionType) and not name.startswith("_")
            }
        return found


@frozen(kw_only=True)
class _Row:
    spec: type[AnySpec]
    applies: Callable[[Any], bool]
    shape: Shape


def _always(_spec: Any) -> bool:
    return True


def _row(
    spec: type[AnySpec],
    protocol: type | None,
    arguments: tuple[str, ...] | None,
    applies: Callable[[Any], bool] = _always,
) -> _Row:
    return _Row(spec=spec, applies=applies, shape=Shape(arguments=arguments, protocol=protocol))


_TAKES_OPTIONS = ("options",)
_SIZED = ("options", "capacity")

_ROWS: tuple[_Row, ...] = (
    _row(BackendSpec, AddressableBackend, _SIZED, lambda spec: spec.capabilities.addressable),
    _row(BackendSpec, Backend, _SIZED),
    _row(EvictionSpec, QuotaPolicy, (), lambda spec: spec.quotas and spec.options is None),
    _row(EvictionSpec, QuotaPolicy, _TAKES_OPTIONS, lambda spec: spec.quotas),
    _row(EvictionSpec, EvictionPolicy, (), lambda spec: spec.options is None),
    _row(EvictionSpec, EvictionPolicy, _TAKES_OPTIONS),
    _row(CommandSpec, Command, ()),
    _row(DeviceSpec, None, None),
    _row(ChannelSpec, Channel, _TAKES_OPTIONS),
    _row(LookupSpec, None, None),
    _row(StagingSpec, Staging, _SIZED),
    _row(SourceSpec, PeerCarrier, ("options", "lookup", "environment")),
)
"""The first row that applies counts."""


def shape_of(spec: AnySpec) -> Shape | None:
    """What the implementation of ``spec`` must look like; ``None`` for a spec without one."""
    return next(
        (row.shape for row in _ROWS if isinstance(spec, row.spec) and row.applies(spec)),
        None,
    )


def call_fault(function: Callable[..., Any], arguments: tuple[str, ...]) -> str:
    """Why ``function`` cannot be called with these arguments by position, or empty text.

    Says nothing about a callable whose signature Python does not know.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return ""
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return ""
