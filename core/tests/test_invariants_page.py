"""The page of invariants names tests and checks that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "invariants.md").read_text()
SECTIONS = {text.partition("\n")[0]: text for text in re.split(r"^## ", PAGE, flags=re.M)[1:]}
PLACES = re.findall(r"`([\w/.]+\.py)(?:::([\w.]+))?`", PAGE)
PROMISES = [title for title in SECTIONS if title[0].isdigit()]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes and other names that a module defines at its top."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def checks_of_the_simulation() -> set[str]:
    """The names under which the simulation fails: written at the check, or given a name before."""
    found = set()
    for path in (ROOT / "tests" / "simulation").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            given: list[ast.expr] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                place = {"require": 1, "SimulationFailure": 0}.get(node.func.id, len(node.args))
                given = node.args[place : place + 1]
            elif isinstance(node, ast.Assign):
                given = [node.value]
            found |= {each.value for each in given if isinstance(each, ast.Constant)}
    return found


def test_every_place_on_the_page_exists() -> None:
    assert len(PLACES) > 50, "the page or its form has changed"
    missing = []
    for file, name in PLACES:
        path = ROOT / file
        if not path.is_file() or (name and name not in names_in(path)):
            missing.append(f"{file}::{name}")
    assert missing == []


def test_every_promise_names_a_test_and_only_checks_that_exist() -> None:
    known = checks_of_the_simulation()
    for title in PROMISES:
        assert re.search(r"::test_\w+`", SECTIONS[title]), f"no test guards {title}"
        _, said, checks = SECTIONS[title].partition("\nSimulation: ")
        named = set(re.findall(r'"([^"]+)"', checks.replace("\n", " ")))
        assert bool(named) == bool(said), title
        assert named - known == set(), title


def test_the_page_holds_all_nine_promises_and_commands_that_work() -> None:
    assert [title.split(".")[0] for title in PROMISES] == [str(number) for number in range(1, 10)]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert set(re.findall(r"`make ([\w-]+)", PAGE)) <= {*targets}
    for module in re.findall(r"-m (tests[\w.]+)", PAGE):
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
