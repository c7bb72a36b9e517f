"""The loops of kvferry that must not run in Python.

Addresses are raw: nothing here checks that they are mapped. Callers compare them with the regions a
plan may name first (``kvferry.data.copy.check_plan``).
"""

from kvferry_native._native import (
    ABI,
    IoUring,
    advise_hugepages,
    copy_spans,
    io_uring_refusal,
    pack_tokens,
    populate,
    process_read,
)

__version__ = "0.1.0"

__all__ = [
    "ABI",
    "IoUring",
    "__version__",
    "advise_hugepages",
    "copy_spans",
    "io_uring_refusal",
    "pack_tokens",
    "populate",
    "process_read",
]
