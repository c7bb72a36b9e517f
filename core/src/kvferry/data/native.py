"""Whether kvferry-native can be used, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, SupportsIndex

from attrs import frozen
from numpy import uint64
from numpy.typing import NDArray

NATIVE_ABI = 2
"""The version of kvferry-native's C interface that this core was written against."""


class NativeModule(Protocol):
    """What core uses of ``kvferry_native``; its stub says what each function does."""

    def copy_spans(
        self,
        dst: NDArray[uint64],
        src: NDArray[uint64],
        length: NDArray[uint64],
        threads: int = 1,
    ) -> None: ...

    def pack_tokens(self, tokens: Sequence[SupportsIndex]) -> bytes: ...

    def populate(self, address: int, length: int, allow_touch: bool = True) -> bool: ...


@frozen
class NativeStatus:
    """Outcome of looking for kvferry-native. ``why`` is one sentence without a full stop."""

    module: NativeModule | None
    version: str
    why: str


def find_native() -> NativeStatus:
    """Import ``kvferry_native`` if it is there and fits. Never raises for an installation fault."""
    try:
        import kvferry_native
    except ModuleNotFoundError as error:
        if error.name == "kvferry_native":
            return NativeStatus(None, "", "kvferry-native is not installed")
        return NativeStatus(None, "", f"kvferry-native is broken: {error}")
    except ImportError as error:  # built for another Python, or a library it needs is missing
        return NativeStatus(None, "", f"kvferry-native is broken: {error}")
    version = kvferry_native.__version__
    if kvferry_native.ABI != NATIVE_ABI:
        why = f"kvferry-native {version} has interface {kvferry_native.ABI}, not {NATIVE_ABI}"
        return NativeStatus(None, version, why)
    return NativeStatus(kvferry_native, version, f"kvferry-native {version} is installed")
