"""What this host has for a channel between its processes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from kvferry.api import Fact, FactKind, FactSource, FactSpec, HostEnvironment

MAPPED = "local.mapped"
CROSS_PROCESS = "local.cross_process"
POSSIBLE = "possible"
"""The value of these facts where nothing stands against it."""
_SCOPE = "proc/sys/kernel/yama/ptrace_scope"

FACT_SPECS = (
    FactSpec(
        path=MAPPED,
        kind=FactKind.TEXT,
        meaning="'possible', or why a channel between processes cannot map memory files",
        source=FactSource.HOST,
        sample=POSSIBLE,
    ),
    FactSpec(
        path=CROSS_PROCESS,
        kind=FactKind.TEXT,
        meaning="'possible', or why processes cannot read each other's memory",
        source=FactSource.HOST,
        sample=POSSIBLE,
    ),
)


def probe_facts(environment: HostEnvironment) -> Iterator[Fact]:
    """What can be found out of this process. Whether a peer lets us read it only shows when it is there."""
    yield Fact(path=MAPPED, value=_mapped_refusal() or POSSIBLE, origin="probe memfd_create")
    yield Fact(
        path=CROSS_PROCESS,
        value=_scope_refusal(environment) or _read_refusal() or POSSIBLE,
        origin=f"probe process_vm_readv, /{_SCOPE}",
    )


def _mapped_refusal() -> str:
    try:
        fd = os.memfd_create("kvferry:probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"the system gives no memory files: {error.strerror}"
    os.close(fd)
    return ""


def _scope_refusal(environment: HostEnvironment) -> str:
    """1 is no refusal: processes that are connected allow each other."""
    with contextlib.suppress(OSError, ValueError):
        scope = int((Path(environment.root) / _SCOPE).read_text())
        if scope == 2:
            return "kernel.yama.ptrace_scope is 2, which allows it to administrators alone"
        if scope > 2:
            return f"kernel.yama.ptrace_scope is {scope}, which forbids it to all"
    return ""


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _read_refusal() -> str:
    """A read of our own memory is refused only where the call as such is."""
    library = ctypes.CDLL(None, use_errno=True)
    read = getattr(library, "process_vm_readv", None)
    if read is None:
        return "the C library has no process_vm_readv"
    pointer, count = ctypes.POINTER(_Vector), ctypes.c_ulong
    read.argtypes = (ctypes.c_int, pointer, count, pointer, count, count)
    read.restype = ctypes.c_ssize_t
    source, target = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
    here, there = _Vector(ctypes.addressof(target), 8), _Vector(ctypes.addressof(source), 8)
    if read(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 8:
        return ""
    number = ctypes.get_errno()
    return f"the system refuses process_vm_readv with {errno.errorcode.get(number, number)}; a sandbox may"
