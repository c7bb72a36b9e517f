"""``kvferry live`` asks only where its configuration says, and nowhere when that cannot be read."""

from __future__ import annotations

import pytest

from kvferry.runtime.address import runtime_root

from .conftest import CONFIG, CommandLine

ACTIONS = (("list",), ("clear",), ("status",), ("quota", "list"), ("pins", "list"))
FAULTS = (
    ("runtime_dir: 5\n", "runtime_dir: expected text"),
    ("runtime_dir: /tmp/there\ncapacity: 1\n", "capacity: unknown key"),
    ("runtime_dirr: /tmp/there\n", "did you mean 'runtime_dir'?"),
    ("runtime_dir: '/tmp/there\n", "not valid YAML"),
)


@pytest.mark.parametrize(("text", "told"), FAULTS)
@pytest.mark.parametrize("action", ACTIONS, ids=" ".join)
def test_a_configuration_with_faults_is_told_and_nothing_is_asked(
    shell: CommandLine, action: tuple[str, ...], text: str, told: str
) -> None:
    ran = shell.run("live", *action, "--config", shell.write(text))
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("error[config] c.yaml:")
    assert told in ran.err
    assert "c.yaml: nothing was asked" in ran.err
    # It never came to look for instances, wherever that would have been.
    assert "instance is running" not in ran.err
    assert str(runtime_root(None, shell.environment)) not in ran.err


@pytest.mark.parametrize("how", ["option", "environment"])
def test_a_configuration_that_is_not_there_is_told(shell: CommandLine, how: str) -> None:
    missing = str(shell.root / "absent.yaml")
    words = ["live", "list"]
    if how == "option":
        words += ["--config", missing]
    else:
        shell.environment["KVFERRY_CONFIG"] = missing
    ran = shell.run(*words)
    assert ran.code == 2
    assert "error[config] absent.yaml: no such configuration file" in ran.err


def test_a_folder_that_is_named_needs_no_configuration(shell: CommandLine) -> None:
    shell.environment["KVFERRY_CONFIG"] = str(shell.root / "absent.yaml")
    ran = shell.run("live", "list", "--runtime-dir", str(shell.root / "r"))
    assert (ran.code, ran.err) == (0, "")
    assert "no instances below r" in ran.out


def test_a_good_configuration_says_where_to_look(shell: CommandLine) -> None:
    folder = shell.root / "r"
    file = shell.write(CONFIG + f"runtime_dir: {folder}\n")
    assert "no instances below r" in shell.run("live", "list", "--config", file).out
