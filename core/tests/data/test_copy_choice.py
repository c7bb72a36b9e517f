"""Which copier a process gets, and what it says about it."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest

from kvferry.api import ErrorKind, KVFerryError
from kvferry.data.copy import choose_copier
from kvferry.data.native import NATIVE_ABI, NativeStatus, find_native


def native_as(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> NativeStatus:
    """What is found when ``kvferry_native`` is a module with this text."""
    (folder / "kvferry_native.py").write_text(source)
    monkeypatch.delitem(sys.modules, "kvferry_native", raising=False)
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if isinstance(f, type)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    found = find_native()
    sys.modules.pop("kvferry_native", None)
    return found


def test_a_module_of_another_interface_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = native_as(monkeypatch, tmp_path, f"__version__ = '9.0'\nABI = {NATIVE_ABI + 1}\n")
    assert status.module is None
    assert status.version == "9.0"
    assert f"interface {NATIVE_ABI + 1}, not {NATIVE_ABI}" in status.why


def test_a_module_that_cannot_load_is_broken_and_not_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status = native_as(monkeypatch, tmp_path, "raise ImportError('libfoo.so: cannot open')\n")
    assert status == NativeStatus(None, "", "kvferry-native is broken: libfoo.so: cannot open")
    inner = native_as(monkeypatch, tmp_path, "import kvferry_native_missing_part\n")
    assert inner.why.startswith("kvferry-native is broken: No module named")


def test_an_absent_module_is_said_to_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvferry_native", None)  # Python's own way to say "not there"
    assert find_native() == NativeStatus(None, "", "kvferry-native is not installed")


def test_numpy_serves_where_native_is_missing_unless_native_was_asked_for() -> None:
    missing = NativeStatus(None, "", "kvferry-native is not installed")
    chosen = choose_copier("auto", status=missing)
    assert chosen.copier.name == "numpy"
    assert chosen.why == missing.why
    with pytest.raises(KVFerryError) as caught:
        choose_copier("native", status=missing)
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert caught.value.why == missing.why
    assert "pip install kvferry-native" in caught.value.remedy


def test_native_serves_with_the_threads_it_is_given() -> None:
    seen: list[int] = []
    module = types.SimpleNamespace(
        copy_spans=lambda _dst, _src, _length, threads=1: seen.append(threads),
        populate=lambda _address, _length, allow_touch=True: allow_touch,
    )
    copier, why = choose_copier("auto", threads=3, status=NativeStatus(module, "1", "installed"))
    assert (copier.name, why) == ("native", "installed")
    column = np.zeros(1, np.uint64)
    copier.copy(column, column, column)
    assert seen == [3]
