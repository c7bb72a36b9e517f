"""A third party's plugin over a folder of files: persistent, and open to the side door at any time.

Tests install it, as it is or with one mistake.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvferry.testing.fake_distributions import fake_distribution

ENTRY = """
    from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

    MANIFEST = Manifest(name="folder", api=">=1.0,<2", rule_prefix="FOLDER", summary="for a test")

    @hookimpl
    def kvferry_backends():
        return [
            BackendSpec(
                name="folder",
                factory="folder_store_backend:FolderBackend",
                options="folder_store_options:FolderOptions",
                capabilities=BackendCapabilities(persistent=True, max_value_bytes=100_000),
            )
        ]
"""

OPTIONS = """
    from typing import Literal  # for a mistake that needs it

    from attrs import frozen


    @frozen(kw_only=True)
    class FolderOptions:
        path: str = ""
        sync: bool = False
"""

BACKEND = """
    import fcntl
    import os
    import zlib
    from pathlib import Path

    from attrs import evolve

    from kvferry.api import (
        ChunkHeader, DeleteStatus, ErrorKind, KVFerryError, ReadStatus, ThreadedBackend, WriteStatus
    )


    def parse(record):
        try:
            header, end = ChunkHeader.from_bytes(record)
        except KVFerryError:
            return None
        return header if len(record) == end + 4 + header.size else None


    class FolderBackend(ThreadedBackend):
        def __init__(self, options, capacity):
            super().__init__()
            self._path, self._capacity = options.path, capacity

        def open_store(self, context):
            self._folder = Path(self._path, f"{context.instance}-{context.rank}-{context.shard.hex()}")
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder, os.O_RDONLY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._lock)
                raise KVFerryError("the folder is in use", kind=ErrorKind.IO, why=str(error)) from error
            for half in self._folder.glob("*.half"):
                half.unlink()
            self._used = sum(each.stat().st_size for each in self._folder.iterdir())

        def close_store(self):
            os.close(self._lock)

        def recover(self):
            for file in list(self._folder.iterdir()):
                header = parse(file.read_bytes())
                if header is not None and self._file(header.key) == file:
                    yield header
                else:
                    self._remove(file)

        def write_one(self, header, value):
            record = header.to_bytes() + zlib.crc32(value).to_bytes(4, "little") + value
            file = self._file(header.key)
            if file.exists():
                return WriteStatus.EXISTS
            if self._used + len(record) > self._capacity:
                return WriteStatus.NO_SPACE
            half = file.with_suffix(".half")
            half.write_bytes(record)
            half.rename(file)
            self._used += len(record)
            return WriteStatus.STORED

        def read_one(self, key, into):
            try:
                record = self._file(key).read_bytes()
            except FileNotFoundError:
                return ReadStatus.MISS
            header = parse(record)
            if header is None or header.key != key:
                return ReadStatus.CORRUPT
            value = record[-header.size :]
            checksum = int.from_bytes(record[-header.size - 4 : -header.size], "little")
            if zlib.crc32(value) != checksum:
                return ReadStatus.CORRUPT
            if len(value) != len(into):
                return ReadStatus.CORRUPT
            into[:] = value
            return ReadStatus.FOUND

        def delete_one(self, key):
            file = self._file(key)
            if not file.exists():
                return DeleteStatus.ABSENT
            self._remove(file)
            return DeleteStatus.DELETED

        def _remove(self, file):
            self._used -= file.stat().st_size
            file.unlink()

        def _file(self, key):
            return self._folder / key.to_bytes().hex()
"""

TESTS = """
    from pathlib import Path

    import pytest
    from folder_store_options import FolderOptions

    from kvferry.testing.conformance import BackendConformance, ManifestConformance


    class TestManifest(ManifestConformance):
        plugin = "folder"


    class TestBackend(BackendConformance):
        plugin = "folder"
        backend = "folder"
        capacity = 1 << 20

        @pytest.fixture
        def options(self, tmp_path):
            return FolderOptions(path=str(tmp_path))

        @pytest.fixture
        def raw(self, tmp_path):
            return Files(tmp_path)


    class Files:
        live = True

        def __init__(self, root):
            self.root = root

        def names(self):
            return [str(each) for each in self.root.glob("*/*") if each.suffix != ".half"]

        def read(self, name):
            return Path(name).read_bytes()

        def write(self, name, data):
            Path(name).write_bytes(data)

        def delete(self, name):
            Path(name).unlink()

        def used_bytes(self):
            return sum(len(self.read(name)) for name in self.names())
"""


def install(folder: Path, mistakes: Iterable[tuple[str, str]] = ()) -> None:
    """Write the plugin into ``folder``; each mistake is a text of it and what stands there instead."""
    texts = {
        "folder_store_plugin.py": ENTRY,
        "folder_store_options.py": OPTIONS,
        "folder_store_backend.py": BACKEND,
    }
    for old, new in mistakes:
        (file,) = (file for file, text in texts.items() if text.count(old) == 1)
        texts[file] = texts[file].replace(old, new)
    fake_distribution(folder, "folder", entry_points={"folder": "folder_store_plugin"}, source=texts)
