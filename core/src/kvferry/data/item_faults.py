"""What the control plane hears of items that a backend or a channel could not do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.api import ErrorKind, ItemResult, KVFerryError
from kvferry.control.orders import ItemFault

_ERROR_FAULTS = {
    ErrorKind.TIMEOUT: ItemFault.TIMEOUT,
    ErrorKind.CANCELLED: ItemFault.CANCELLED,
    ErrorKind.CLOSED: ItemFault.CANCELLED,
    ErrorKind.CAPACITY: ItemFault.NO_SPACE,
}


def fault_of(error: Exception) -> ItemFault:
    """What something failed of that raised ``error``."""
    kind = error.kind if isinstance(error, KVFerryError) else ErrorKind.INTERNAL
    return _ERROR_FAULTS.get(kind, ItemFault.FAILED)


def faults_of(
    results: Sequence[ItemResult[Any]], good: object, known: Mapping[Any, ItemFault | None]
) -> tuple[dict[int, ItemFault], str]:
    """What failed, by its place, and the first reason. ``known`` maps other outcomes to faults, or to
    ``None`` if they are as good."""
    faults: dict[int, ItemFault] = {}
    reason = ""
    for place, result in enumerate(results):
        if result.status is good:
            continue
        if result.error is None:
            fault = known[result.status]
        else:
            fault = fault_of(result.error)
            reason = reason or str(result.error)
        if fault is not None:
            faults[place] = fault
    return faults, reason
