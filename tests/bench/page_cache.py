"""Files out of the page cache, so that reading them means the disk."""

from __future__ import annotations

import os
from pathlib import Path


def drop(folder: Path) -> None:
    """Everything below ``folder``. Pages that were not written back yet are written first."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
