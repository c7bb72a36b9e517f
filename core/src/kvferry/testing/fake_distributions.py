"""Distributions that exist only in a folder of a test, installed as far as Python can tell."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution
from pathlib import Path
from textwrap import dedent

from kvferry.api import ENTRY_POINT_GROUP, OFFER_GROUP


def fake_distribution(
    folder: Path,
    name: str,
    *,
    entry_points: Mapping[str, str],
    source: Mapping[str, str],
    requires: Sequence[str] = (),
    version: str = "1.0",
    group: str = ENTRY_POINT_GROUP,
    offers: Mapping[str, str] | None = None,
) -> Path:
    """Write modules and a proper ``.dist-info`` into ``folder``; returns the ``.dist-info``.

    ``entry_points`` maps plugin names to modules, ``source`` file names to their text (indentation
    is removed), ``requires`` are ``Requires-Dist`` lines, ``offers`` maps ``kind.name`` to plugin
    names. The folder's name is written with underscores: with hyphens, ``importlib.metadata`` takes
    several such folders for one.
    """
    for file_name, text in source.items():
        path = folder / file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {line}" for line in requires]
    (info / "METADATA").write_text("\n".join(metadata) + "\n", encoding="utf-8")
    points = [f"[{group}]", *(f"{key} = {value}" for key, value in entry_points.items())]
    if offers:
        points += [f"[{OFFER_GROUP}]", *(f"{key} = {value}" for key, value in offers.items())]
    (info / "entry_points.txt").write_text("\n".join(points) + "\n", encoding="utf-8")
    return info


def distributions_in(*folders: Path) -> tuple[Distribution, ...]:
    """The distributions in these folders and no others."""
    return tuple(importlib.metadata.distributions(path=[str(folder) for folder in folders]))


@contextlib.contextmanager
def importable(*folders: Path) -> Iterator[None]:
    """Put the folders on the import path; afterwards the path and the loaded modules are as before.

    Changes the process's import state, so only one test at a time may be inside.
    """
    path, modules = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(folder) for folder in folders]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            origin = getattr(sys.modules[name], "__file__", None) or ""
            if any(origin.startswith(f"{folder}/") for folder in folders):
                del sys.modules[name]
        importlib.invalidate_caches()
