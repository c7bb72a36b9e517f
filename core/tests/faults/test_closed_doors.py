"""Nobody beyond this user is heard, and nothing that is read can run."""

from __future__ import annotations

import ast
import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("kvferry", "kvferry_backend_cpu", "kvferry_connector_vllm", "kvferry_eviction_policies")
RUNS_WHAT_IT_READS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
RUNS_WHAT_IT_IS_GIVEN = {"eval", "exec", "compile", "__import__"}


def listening_ports() -> set[str]:
    """Addresses at which this process listens beyond files, as the kernel writes them."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the listing's own descriptor
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.add(words[1])
    return found


def test_an_open_instance_listens_on_no_network_port(open_instance: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)):
        before = listening_ports()
        assert len(before) == 1, "a port that is open is not seen"
        instance = open_instance()
        instance.engine.add(list(range(40)))
        instance.engine.run()
        instance.settle()
        assert listening_ports() == before


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] in RUNS_WHAT_IT_READS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in RUNS_WHAT_IT_READS:
            yield str(node.module)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in RUNS_WHAT_IT_IS_GIVEN:
                yield node.func.id
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield node.arg


def test_no_module_reads_a_format_that_can_run_code() -> None:
    """Bytes of a peer or a file are data, whatever they say (LMCache#926)."""
    found = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in Path(root).rglob("*.py"):
                found += [f"{path}: {danger}" for danger in dangers(ast.parse(path.read_text()))]
    assert found == []


@pytest.mark.parametrize(
    ("code", "danger"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("exec(text)", "exec"),
        ("numpy.load(file, allow_pickle=True)", "allow_pickle"),
        ("re.compile(text)", None),
    ],
)
def test_the_search_knows_a_danger_when_it_sees_one(code: str, danger: str | None) -> None:
    assert list(dangers(ast.parse(code))) == ([] if danger is None else [danger])
