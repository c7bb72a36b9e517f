"""Every distribution is built as a wheel and installed into a clean environment, one after the other."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from tests import commands

ROOT = Path(__file__).parents[2]
SOURCES = {
    "kvferry": "core",
    "kvferry_native": "csrc",
    "kvferry_backend_cpu": "plugins/backend_cpu",
    "kvferry_backend_ssd": "plugins/backend_ssd",
    "kvferry_eviction_policies": "plugins/eviction_policies",
    "kvferry_connector_vllm": "plugins/connector_vllm",
    "kvferry_transport_tcp": "plugins/transport_tcp",
    "kvferry_transport_local": "plugins/transport_local",
    "kvferry_sharing_p2p": "plugins/sharing_p2p",
    "kvferry_host_staging": "plugins/host_staging",
}


def run(*command: str | Path, cwd: Path | None = None) -> str:
    return commands.output_of(command, commands.call(*command, cwd=cwd))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    sources = [ROOT / source for source in SOURCES.values()]
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, *sources)
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


class CleanEnvironment:
    """A virtual environment that sees nothing but what is installed into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin/python"
        run(sys.executable, "-m", "venv", folder)

    def install(self, *wheels: Path) -> None:
        run(self.python, "-m", "pip", "install", "-q", "--find-links", wheels[0].parent, *wheels)

    def plugins(self) -> dict[str, str]:
        """State by name; empty when no plugin beside the built-in one is there."""
        listed = json.loads(run(self.folder / "bin/kvferry", "plugins", "--format", "json"))
        return {row["name"]: row["state"] for row in listed["plugins"] if row["name"] != "core"}

    def imports(self, module: str) -> set[str]:
        code = f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
        return set(run(self.python, "-c", code, cwd=self.folder).split())


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    return CleanEnvironment(tmp_path_factory.mktemp("clean") / "venv")


@pytest.mark.parametrize("package", SOURCES)
def test_a_wheel_carries_its_types_and_no_foreign_package(wheels: dict[str, Path], package: str) -> None:
    names = zipfile.ZipFile(wheels[package]).namelist()
    assert f"{package}/py.typed" in names
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {package}


def test_wheels_install_one_by_one(wheels: dict[str, Path], environment: CleanEnvironment) -> None:
    environment.install(wheels["kvferry"])
    assert environment.plugins() == {}
    assert run(environment.folder / "bin/kvferry", "--version").startswith("kvferry 0.1")
    assert not {"torch", "vllm", "zmq", "redis"} & environment.imports("kvferry.runtime")

    environment.install(wheels["kvferry_backend_cpu"])
    environment.install(wheels["kvferry_connector_vllm"])
    assert environment.plugins() == {"backend_cpu": "found", "connector_vllm": "found"}
    file = environment.folder / "k.yaml"
    file.write_text("plugins: [backend_cpu, connector_vllm]\ntiers:\n  cpu: {use: cpu, capacity: 64MiB}\n")
    report = run(environment.folder / "bin/kvferry", "check", file)
    assert "kvferry-native is not installed" in report

    environment.install(wheels["kvferry_native"])
    assert "kvferry-native is not installed" not in run(environment.folder / "bin/kvferry", "check", file)


def test_the_native_wheel_needs_nothing(
    wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = CleanEnvironment(tmp_path_factory.mktemp("alone") / "venv")
    alone.install(wheels["kvferry_native"])
    code = "import kvferry_native as n; print(n.pack_tokens([1, 2**32 - 1]).hex())"
    assert run(alone.python, "-c", code).strip() == "01000000ffffffff"
