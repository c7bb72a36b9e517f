"""A machine, its plugins and its command line, all inside one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from kvferry.cli.host import Host
from kvferry.cli.main import main
from kvferry.testing.fake_distributions import distributions_in, fake_distribution, importable

TAPE = """
    import argparse

    from kvferry.api import (
        BackendCapabilities, BackendSpec, Check, CommandSpec, Example, Known, Manifest, Rule,
        Severity, hookimpl,
    )

    MANIFEST = Manifest(name="backend_tape", api=">=1.0,<2", rule_prefix="TAPE")

    @hookimpl
    def kvferry_backends():
        return [
            BackendSpec(
                name="tape",
                factory="zoo_tape.parts:Backend",
                options="zoo_tape.parts:Options",
                capabilities=BackendCapabilities(addressable=True),
            )
        ]

    @hookimpl
    def kvferry_commands():
        return [CommandSpec(name="rewind", factory="zoo_tape.parts:Rewind", summary="rewind it")]

    @hookimpl
    def kvferry_rules():
        return [
            Rule(
                id="TAPE001",
                severity=Severity.WARNING,
                each="tiers",
                when=Known("tiers.*.reel"),
                require=Check("tiers.*.reel <= 9", ("tiers.*.reel",), lambda reel: reel <= 9),
                message="reel {tiers.*.reel} is far away",
                fix="use a reel up to 9",
                source="design",
                examples=(
                    Example(facts={"tiers.t.reel": 1}, passes=True),
                    Example(facts={"tiers.t.reel": 10}, passes=False),
                ),
            )
        ]
"""
PARTS = """
    from attrs import frozen

    class Backend:
        def __init__(self, options, capacity):
            self.capacity = capacity

        def open(self, context):
            raise NotImplementedError("no test of the command line opens it")

        def ready_bytes(self):
            return 0

        def close(self):
            pass

    @frozen
    class Options:
        reel: int = 1

    class Rewind:
        def configure(self, parser):
            parser.add_argument("--turns", type=int, default=1)

        def run(self, arguments):
            print("rewound", arguments.turns)
            return 7
"""
CONFIG = """\
plugins: [backend_tape]
tiers:
  cpu: {use: tape, capacity: 8GiB}
"""


@frozen
class Ran:
    """What a run of the command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class CommandLine:
    """Runs ``kvferry`` on a machine of the test's own, with plugin ``backend_tape`` installed."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.site = root / "site"
        self.environment: dict[str, str] = {}
        self.piped = b""
        self.columns: int | None = None
        self._capsys = capsys
        self.machine("proc/meminfo", "MemTotal: 33554432 kB\n")
        self.machine("sys/kernel/mm/transparent_hugepage/shmem_enabled", "[advise] never\n")
        self.install("kvferry-backend-tape", "backend_tape", "zoo_tape", TAPE, PARTS)

    def machine(self, name: str, text: str) -> None:
        path = self.root / "machine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def install(self, distribution: str, name: str, package: str, plugin: str, parts: str = "") -> None:
        fake_distribution(
            self.site,
            distribution,
            entry_points={name: f"{package}.plugin"},
            source={
                f"{package}/__init__.py": "",
                f"{package}/plugin.py": plugin,
                f"{package}/parts.py": parts,
            },
            requires=["kvferry>=0.1"],
        )

    def write(self, text: str = CONFIG, name: str = "c.yaml") -> str:
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    def host(self) -> Host:
        return Host(
            environment=self.environment,
            root=str(self.root / "machine"),
            columns=self.columns,
            read_input=lambda: self.piped,
            distributions=lambda: distributions_in(self.site),
        )

    def run(self, *words: str) -> Ran:
        """Run; paths of the test's folder are cut from the output."""
        self._capsys.readouterr()
        with importable(self.site):
            code = main(words, self.host())
        captured = self._capsys.readouterr()
        cut = f"{self.root}/"
        return Ran(code, captured.out.replace(cut, ""), captured.err.replace(cut, ""))


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path, capsys)
