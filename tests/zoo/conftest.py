"""Tiny plugins, built as wheels and installed by pip into an environment of their own.

The environment is made once per run. It has nothing but the zoo in its own folder; everything else it
takes from the environment that runs the tests, through a ``.pth`` file: so the zoo meets this working
tree's core and the very versions of its dependencies, nothing is downloaded, and nothing that a plugin
of the zoo does can reach the environment around. Not through ``system-site-packages``, which means the
interpreter's own packages and not those of a virtual environment.
"""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from tests.commands import call

DISTRIBUTIONS = Path(__file__).parent / "distributions"
EDITABLE = "zoo-editable"
HALF_GONE = "zoo-half-gone"

# The build hooks of PEP 517 work in the current folder, so they get a process of their own.
_BUILD = """
import os, sys
from hatchling.build import build_wheel
target, *sources = sys.argv[1:]
for source in sources:
    os.chdir(source)
    build_wheel(target)
"""


@frozen(kw_only=True)
class Ran:
    """What a process left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*command: str | Path, cwd: Path, environment: Mapping[str, str] | None = None) -> Ran:
    """Run a command without the settings of the user who runs the tests."""
    done = call(*command, cwd=cwd, without=("KVFERRY", "PIP_"), environment=environment)
    return Ran(code=done.returncode, out=done.stdout, err=done.stderr)


class ZooEnvironment:
    """A virtual environment with the zoo in it, and ``kvferry`` as an operator would run it there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = root / "sources"
        self.python = root / "venv/bin/python"
        self.site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(root / "venv")}))

    def make(self) -> None:
        # A copy, so that what a test does to a source does not stay in the repository.
        shutil.copytree(DISTRIBUTIONS, self.sources, ignore=shutil.ignore_patterns("__pycache__"))
        self.must(sys.executable, "-m", "venv", "--without-pip", self.root / "venv")
        around = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in sorted(around)]
        (self.site / "around.pth").write_text("".join(lines))
        wheels = self.root / "wheels"
        wheels.mkdir()
        built = [source for source in sorted(self.sources.iterdir()) if source.name != EDITABLE]
        self.must(sys.executable, "-c", _BUILD, wheels, *built)
        self.pip("install", *sorted(wheels.iterdir()))
        self.pip("install", "--no-build-isolation", "--editable", self.sources / EDITABLE)
        # What is left when files are deleted by hand, or an uninstallation stops in the middle.
        shutil.rmtree(self.site / HALF_GONE.replace("-", "_"))

    def pip(self, action: str, *words: str | Path) -> None:
        """Run the pip around on this environment, without dependencies and without a network."""
        offline = ("--no-index", "--no-deps") if action == "install" else ()
        self.must(
            *(sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"),
            *(action, "--quiet", *offline, *words),
        )

    def must(self, *command: str | Path) -> Ran:
        ran = run(*command, cwd=self.root)
        assert ran.code == 0, f"{command} gave {ran.code}\n{ran.out}\n{ran.err}"
        return ran

    def kvferry(self, *words: str | Path, environment: Mapping[str, str] | None = None) -> Ran:
        """The command line of core, in the zoo's environment."""
        return run(self.python, "-m", "kvferry.cli.main", *words, cwd=self.root, environment=environment)

    def script(self, code: str, *words: str | Path) -> Ran:
        """A program of the zoo's environment, which prints JSON."""
        return run(self.python, "-c", code, *words, cwd=self.root)

    def write(self, text: str, name: str = "c.yaml") -> str:
        """A configuration beside the environment; its name as commands take it."""
        (self.root / name).write_text(text)
        return name


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> ZooEnvironment:
    environment = ZooEnvironment(tmp_path_factory.mktemp("zoo"))
    environment.make()
    return environment
