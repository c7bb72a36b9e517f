"""Fixed-length columns that Python reads one by one and NumPy in bulk."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
"""Entry ids, ready to index columns with."""


class Column:
    """``length`` numbers, all zero at first, of ``dtype`` (``int32`` unless said otherwise).

    ``array`` and ``view`` share one memory: the view is the quicker one for a single element, the
    array for many. There is no object per element, so that a million entries are no work for the
    garbage collector, and pages that were never touched cost address space only.
    """

    __slots__ = ("array", "view")

    def __init__(self, length: int, dtype: npt.DTypeLike = np.int32) -> None:
        self.array: npt.NDArray[Any] = np.zeros(length, dtype)
        self.view: memoryview[Any] = self.array.data
