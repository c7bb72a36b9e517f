"""The suite for keyed backends, put to two backends that are right and to mistakes it must notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.api import Backend, ChunkKey
from kvferry.plugins import LoadedPlugins, PluginRequest, load_plugins
from kvferry.testing.conformance import BackendConformance, RawStore
from kvferry.testing.fake_distributions import distributions_in, fake_distribution, importable
from kvferry.testing.keyed_backends import DictionaryBackend, Record

PLUGIN = """
    from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

    MANIFEST = Manifest(name="{name}", api=">=1.0,<2", rule_prefix="TRY", summary="for a test")

    @hookimpl
    def kvferry_backends():
        return [
            BackendSpec(
                name="store",
                factory="{factory}",
                options="{options}",
                capabilities=BackendCapabilities({claims}),
            )
        ]
"""

SHARED = """
    from attrs import field, frozen

    from kvferry.api import ProbeStatus
    from kvferry.testing.keyed_backends import DictionaryBackend


    @frozen(kw_only=True)
    class Options:
        stores: dict = field(factory=dict)
        "Stands for a server: one dictionary of records per shard."


    class SharedBackend(DictionaryBackend):
        def __init__(self, options, capacity):
            super().__init__(options, capacity)
            self._stores = options.stores

        def open_store(self, context):
            self.records = self._stores.setdefault(context.shard, {})

        def close_store(self):
            self.records = {}

        def probe_one(self, key):
            return ProbeStatus.PRESENT if key in self.records else ProbeStatus.ABSENT
"""


def load(folder: Path, name: str, factory: str, options: str, claims: str, **source: str) -> LoadedPlugins:
    entry = PLUGIN.format(name=name, factory=factory, options=options, claims=claims)
    files = {f"{name}_entry.py": entry, **{f"{module}.py": text for module, text in source.items()}}
    fake_distribution(folder, name, entry_points={name: f"{name}_entry"}, source=files)
    found = load_plugins([PluginRequest(name=name)], distributions=lambda: distributions_in(folder))
    found.raise_for_faults()
    return found


class Records:
    """The side door to dictionaries of records: value and checksum are the stored bytes."""

    live = True

    def __init__(self, backends: list[Backend], stores: dict[bytes, dict[ChunkKey, Record]]) -> None:
        self._backends = backends
        self._stores = stores

    def _all(self) -> dict[str, tuple[dict[ChunkKey, Record], ChunkKey]]:
        tables = [each.records for each in self._backends if isinstance(each, DictionaryBackend)]
        return {
            f"{number} {key.to_text()}": (table, key)
            for number, table in enumerate([*tables, *self._stores.values()])
            for key in list(table)
        }

    def names(self) -> list[str]:
        return list(self._all())

    def read(self, name: str) -> bytes:
        table, key = self._all()[name]
        record = table[key]
        return record.header.to_bytes() + record.checksum.to_bytes(4, "little") + record.value

    def write(self, name: str, data: bytes) -> None:
        table, key = self._all()[name]
        known = table[key]
        end = len(known.header.to_bytes())
        changed = data[:end] != known.header.to_bytes()
        checksum = int.from_bytes(data[end : end + 4], "little") ^ changed
        table[key] = Record(known.header, data[end + 4 :], checksum)

    def delete(self, name: str) -> None:
        table, key = self._all()[name]
        del table[key]

    def used_bytes(self) -> int:
        return sum(len(table[key].value) for table, key in self._all().values() if key in table)


class TestADictionary(BackendConformance):
    """Neither persistent nor shared."""

    plugin = "dictionary"
    backend = "store"
    capacity = 1 << 20

    @pytest.fixture
    def plugins(self, tmp_path: Path) -> Iterator[LoadedPlugins]:
        module = "kvferry.testing.keyed_backends"
        with importable(tmp_path):
            yield load(
                tmp_path, self.plugin, f"{module}:DictionaryBackend", f"{module}:DictionaryOptions", ""
            )

    @pytest.fixture
    def raw(self, bench: Any) -> RawStore:
        return Records(Backends(bench), {})


class Backends(list[Backend]):
    """Those that a bench has opened so far."""

    def __init__(self, bench: Any) -> None:
        super().__init__()
        self._bench = bench

    def __iter__(self) -> Iterator[Backend]:
        return (driver.backend for driver in self._bench.drivers[-1:])


class TestASharedDictionary(BackendConformance):
    """Shared, with a limit, over one store that outlives its backends."""

    plugin = "server"
    backend = "store"
    capacity = 3 << 20

    @pytest.fixture
    def plugins(self, tmp_path: Path) -> Iterator[LoadedPlugins]:
        with importable(tmp_path):
            yield load(
                tmp_path,
                self.plugin,
                "shared_store:SharedBackend",
                "shared_store:Options",
                "shared=True, max_value_bytes=1_000_000",
                shared_store=SHARED,
            )

    @pytest.fixture
    def raw(self, options: Any) -> RawStore:
        return Records([], options.stores)
