"""What the system refuses, told with its own name and a remedy."""

from __future__ import annotations

import errno
import logging
import os

from kvferry.api import ErrorKind, KVFerryError, Retry

_log = logging.getLogger(__name__)

_REMEDIES = {
    errno.ENOSPC: ("free space on this disk, or lower the tier's capacity", Retry.LATER),
    errno.EDQUOT: ("raise the user's quota on this disk, or lower the tier's capacity", Retry.AFTER_CHANGE),
    errno.EIO: ("look for the disk in the kernel's log (dmesg), and replace it if it fails", Retry.LATER),
    errno.EACCES: ("let the engine's user read and write the folder", Retry.AFTER_CHANGE),
    errno.EPERM: ("let the engine's user read and write the folder", Retry.AFTER_CHANGE),
    errno.EROFS: ("mount the file system for writing, after a look into the kernel's log", Retry.LATER),
    errno.ENOENT: ("bring the folder or its disk back; the tier begins anew where it is empty", Retry.LATER),
    errno.EISDIR: ("remove the folder that lies in place of the file", Retry.AFTER_CHANGE),
    errno.ENOTDIR: (
        "choose a path that is a folder, or remove what stands there in place of one",
        Retry.AFTER_CHANGE,
    ),
    errno.ESTALE: ("bring the folder or its disk back", Retry.LATER),
    errno.ENODEV: ("bring the disk back", Retry.LATER),
    errno.EFBIG: ("raise the limit of file sizes (ulimit -f), or lower the capacity", Retry.AFTER_CHANGE),
    errno.EMFILE: ("raise the limit of open files (ulimit -n)", Retry.AFTER_CHANGE),
    errno.ENFILE: ("raise the system's limit of open files (fs.file-max)", Retry.AFTER_CHANGE),
    errno.ELOOP: ("choose a path without links in a circle", Retry.AFTER_CHANGE),
    errno.ENAMETOOLONG: ("choose a shorter path", Retry.AFTER_CHANGE),
}
_ELSE = ("look into the kernel's log (dmesg)", Retry.LATER)


def fault(error: OSError, what: str, where: str) -> KVFerryError:
    """``error`` as an error of ours; ``what`` is the sentence, ``where`` a path."""
    number = error.errno or errno.EIO
    remedy, retry = _REMEDIES.get(number, _ELSE)
    told = KVFerryError(
        what, kind=ErrorKind.IO, where=where, why=errno_text(number), remedy=remedy, retry=retry
    )
    told.__cause__ = error
    return told


def errno_text(number: int) -> str:
    """``ENOSPC (No space left on device)``."""
    return f"{errno.errorcode.get(number, f'errno {number}')} ({os.strerror(number)})"


def os_error(result: int) -> OSError:
    """The error that a result below zero of :class:`BlockIO` stands for."""
    return OSError(-result, os.strerror(-result))


def broken(error: Exception) -> KVFerryError:
    """The fault of an item that a defect of ours hit."""
    told = KVFerryError(
        "the SSD backend failed",
        kind=ErrorKind.INTERNAL,
        why=repr(error),
        remedy="report it to the authors of kvferry",
    )
    told.__cause__ = error
    return told


def told_as(error: Exception, doing: str) -> KVFerryError:
    """What items are told that ``error`` hit while ``doing`` something. The log has a defect of ours."""
    if isinstance(error, KVFerryError):
        return error
    _log.error("kvferry: the SSD backend failed while %s", doing, exc_info=error)
    return broken(error)


def short_write(result: int) -> OSError:
    """What a write of fewer bytes than wanted stands for."""
    if result < 0:
        return os_error(result)
    return OSError("the disk took a part of it and no more")
