"""Whether the kernel lets us use io_uring. Light: asked before any tier is opened."""

from __future__ import annotations

NATIVE_ABI = 2
"""The version of kvferry-native's interface that this was written against."""


def uring_refusal() -> str:
    """Why io_uring cannot be used here, in one sentence without a full stop; empty if it can."""
    try:
        import kvferry_native
    except ModuleNotFoundError as error:
        if error.name == "kvferry_native":
            return "kvferry-native is not installed"
        return f"kvferry-native is broken: {error}"
    except ImportError as error:  # built for another Python, or a library it needs is missing
        return f"kvferry-native is broken: {error}"
    if kvferry_native.ABI != NATIVE_ABI:
        return f"kvferry-native has interface {kvferry_native.ABI}, not {NATIVE_ABI}"
    refusal: str = kvferry_native.io_uring_refusal()
    return refusal
