"""The kit's laws, put to this backend."""

from pathlib import Path

import lmdb
import pytest
from acme_lmdb.options import LmdbOptions

from kvferry.testing.conformance import BackendConformance, ManifestConformance


class TestAcmeManifest(ManifestConformance):
    plugin = "acme_lmdb"


class TestAcmeBackend(BackendConformance):
    plugin = "acme_lmdb"
    backend = "lmdb"

    @pytest.fixture
    def options(self, tmp_path):
        return LmdbOptions(path=str(tmp_path))

    @pytest.fixture
    def raw(self, tmp_path):
        return LmdbRecords(tmp_path)


class LmdbRecords:
    """The side door: LMDB itself, over every environment below a folder."""

    live = False

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> list[str]:
        found = []
        for folder in sorted(self.root.iterdir()):
            with self._open(folder.name) as environment, environment.begin() as reading:
                found += [f"{folder.name}/{key.hex()}" for key, _ in reading.cursor()]
        return found

    def read(self, name: str) -> bytes:
        folder, key = name.split("/")
        with self._open(folder) as environment, environment.begin() as reading:
            return reading.get(bytes.fromhex(key))

    def write(self, name: str, data: bytes) -> None:
        folder, key = name.split("/")
        with self._open(folder) as environment, environment.begin(write=True) as writing:
            writing.put(bytes.fromhex(key), data)

    def delete(self, name: str) -> None:
        folder, key = name.split("/")
        with self._open(folder) as environment, environment.begin(write=True) as writing:
            writing.delete(bytes.fromhex(key))

    def used_bytes(self) -> int:
        return sum(len(name.split("/")[1]) // 2 + len(self.read(name)) for name in self.names())

    def _open(self, folder: str) -> lmdb.Environment:
        return lmdb.open(str(self.root / folder), map_size=1 << 30, lock=False)
