"""A zoo of plugins that are installed only inside one test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kvferry.plugins import LoadedPlugins, PluginRecord, PluginRequest, load_plugins
from kvferry.testing.fake_distributions import distributions_in, fake_distribution, importable

GOOD = """
    from kvferry.api import BackendCapabilities, BackendSpec, Fact, Manifest, hookimpl

    MANIFEST = Manifest(name="{name}", api=">=1.0,<2", rule_prefix="{prefix}")

    @hookimpl
    def kvferry_backends():
        return [
            BackendSpec(
                name="{spec}",
                factory="{package}.backend:Backend",
                options="{package}.options:Options",
                capabilities=BackendCapabilities(addressable=True),
            )
        ]
"""


class Zoo:
    """Installs fake plugins and loads them. Plugin ``x`` lives in package ``zoo_x``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders: list[Path] = []

    def folder(self) -> Path:
        made = self.root / f"site{len(self.folders)}"
        made.mkdir()
        self.folders.append(made)
        return made

    def add(
        self,
        name: str,
        plugin: str | None = None,
        *,
        distribution: str | None = None,
        requires: Sequence[str] = (),
        version: str = "1.0",
        package: str | None = None,
        spec: str | None = None,
        prefix: str | None = None,
        more: Mapping[str, str] | None = None,
        module: str | None = None,
        offers: Sequence[str] = (),
    ) -> str:
        """Install a plugin whose entry module holds ``plugin``; a good one without. Returns its
        distribution's name."""
        package = package or f"zoo_{name}"
        prefix = prefix or name.replace("_", "").upper()
        text = plugin or GOOD
        for mark, value in (
            ("{name}", name),
            ("{package}", package),
            ("{spec}", spec or name.replace("_", "-")),
            ("{prefix}", prefix),
        ):
            text = text.replace(mark, value)
        distribution = distribution or f"acme-{name.replace('_', '-')}"
        fake_distribution(
            self.folder(),
            distribution,
            entry_points={name: module or f"{package}.plugin"},
            source={f"{package}/__init__.py": "", f"{package}/plugin.py": text, **(more or {})},
            requires=requires,
            version=version,
            offers=dict.fromkeys(offers, name),
        )
        return distribution

    def load(self, *names: str | PluginRequest) -> LoadedPlugins:
        requests = [
            PluginRequest.parse(name, origin=f"c.yaml:{line}:3") if isinstance(name, str) else name
            for line, name in enumerate(names, start=2)
        ]
        with importable(*self.folders):
            return load_plugins(requests, distributions=lambda: distributions_in(*self.folders))

    def row(self, *names: str) -> PluginRecord:
        """The row of the last of ``names``."""
        return row(self.load(*names), names[-1].partition("@")[0])


def row(plugins: LoadedPlugins, name: str) -> PluginRecord:
    (found,) = [record for record in plugins.records if record.name == name]
    return found


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    return Zoo(tmp_path)
