"""What several test files of the SSD backend need."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.testing.conformance.keyed_subject import Workbench
from kvferry_backend_ssd.options import IOPath
from kvferry_backend_ssd.refusal import uring_refusal
from plugins.backend_ssd.tests.ssd_bench import Faults, workbench

_IN_MEMORY = Path("/dev/shm")


@pytest.fixture(params=[IOPath.THREADS, IOPath.IO_URING], ids=lambda path: path.value)
def io_path(request: pytest.FixtureRequest) -> IOPath:
    """Each of the two I/O paths that this machine has."""
    wanted: IOPath = request.param
    refusal = "" if wanted is IOPath.THREADS else uring_refusal()
    if refusal:
        pytest.skip(f"io_uring cannot be used here: {refusal}")
    return wanted


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def bench(tmp_path: Path, faults: Faults) -> Iterator[Workbench]:
    """Opens backends whose I/O fails as ``faults`` says."""
    made = workbench(tmp_path, make_io=faults.make)
    yield made
    faults.held.set()
    made.close_all()


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """A folder in memory where there is one: flushes cost nothing there, and whoever only kills
    processes, or builds what a disk may hold, needs no disk."""
    root = _IN_MEMORY if _IN_MEMORY.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="ssd-test-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
