"""Token ids as bytes."""

from __future__ import annotations

import array
import sys
from collections.abc import Callable, Sequence

TOKEN_BYTES = 4
LARGEST_TOKEN = 2**32 - 1

TokenPacker = Callable[[Sequence[int]], bytes]
"""Shape of :func:`pack_tokens`; an implementation must give the same bytes and must raise
``OverflowError``, ``TypeError`` or ``ValueError`` for the same input."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Each id as 4 bytes, little-endian, without any header.

    Raises ``OverflowError`` for an id outside 0 to 2**32-1 and ``TypeError`` for anything that is
    not an integer. Pure; any thread.
    """
    packed = array.array("I", tokens)  # 4 bytes on every platform CPython runs on
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
