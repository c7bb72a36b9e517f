"""The kit's laws, put to the SSD backend on both I/O paths, past the page cache and through it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from kvferry.api import ByteSize
from kvferry.testing.conformance import BackendConformance, ManifestConformance, RuleConformance
from kvferry_backend_ssd.options import IOPath, SSDOptions
from kvferry_backend_ssd.refusal import uring_refusal
from plugins.backend_ssd.tests.ssd_raw import StoredChunks


class TestSSDManifest(ManifestConformance):
    plugin = "backend_ssd"


class TestSSDRules(RuleConformance):
    plugin = "backend_ssd"
    rule_prefix = "SSD"


class SSDLaws(BackendConformance):
    """The kit's chunks have every size from one byte to a quarter of the tier, so slots are small here and
    large chunks take many."""

    __test__ = False
    plugin = "backend_ssd"
    backend = "ssd"
    io: ClassVar[IOPath]
    direct: ClassVar[bool]

    @pytest.fixture
    def options(self, tmp_path: Path) -> SSDOptions:
        if self.io is IOPath.IO_URING and uring_refusal():
            pytest.skip(uring_refusal())
        return SSDOptions(path=str(tmp_path), io=self.io, direct=self.direct, slot=ByteSize(4096))

    @pytest.fixture
    def raw(self, tmp_path: Path) -> StoredChunks:
        return StoredChunks(tmp_path)


class TestUringDirect(SSDLaws):
    io, direct = IOPath.IO_URING, True


class TestUringBuffered(SSDLaws):
    io, direct = IOPath.IO_URING, False


class TestThreadsDirect(SSDLaws):
    io, direct = IOPath.THREADS, True


class TestThreadsBuffered(SSDLaws):
    io, direct = IOPath.THREADS, False
