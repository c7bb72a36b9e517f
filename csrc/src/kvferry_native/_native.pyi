from collections.abc import Sequence
from typing import SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

# Anything with a one-dimensional contiguous buffer of uint64.
_Words: TypeAlias = NDArray[np.uint64] | Buffer
# The same of int64, writable.
_Results: TypeAlias = NDArray[np.int64] | Buffer

ABI: int

class IoUring:
    def __init__(self, entries: int) -> None: ...
    def run(
        self,
        write: bool,
        fd: int,
        offsets: _Words,
        addresses: _Words,
        lengths: _Words,
        results: _Results,
        depth: int,
    ) -> None: ...
    def close(self) -> None: ...

def copy_spans(dst: _Words, src: _Words, length: _Words, threads: int = 1) -> None: ...
def io_uring_refusal() -> str: ...
def populate(address: int, length: int, allow_touch: bool = True) -> bool: ...
def advise_hugepages(address: int, length: int) -> bool: ...
def process_read(pid: int, local: _Words, remote: _Words, lengths: _Words, results: _Results) -> None: ...
def pack_tokens(tokens: Sequence[SupportsIndex]) -> bytes: ...
