"""What ``kvferry controller`` refuses to do, and how it says so."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvferry.cli.main import main
from plugins.sharing_p2p.tests.controller_sides import PATIENCE, SECRET


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (("--listen", "tcp://0.0.0.0:0"), "needs a shared secret", "--secret-file"),
        (("--listen", "tcp://[::]:0"), "needs a shared secret", "--secret-file"),
        (("--http", "0.0.0.0:0"), "could be read by other machines", "--http-beyond-loopback"),
        (("--listen", "tcp://192.0.2.1:9", "--secret-variable", "GOOD"), "cannot listen", "address of this"),
        (("--listen", "tcp://127.0.0.1:0", "--secret-variable", "SHORT"), "too short", "openssl rand"),
        (("--listen", "tcp://127.0.0.1:0", "--secret-variable", "UNSET"), "holds no secret", "set it"),
        (("--secret-file", "{folder}/none"), "cannot be read", "name a file"),
        (("--secret-file", "f", "--secret-variable", "v"), "two places", "one of them"),
        (("--heartbeat", "2s", "--limit", "3s"), "less than two heartbeats", "three heartbeats"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_what_cannot_be_is_refused_at_the_start(
    words: tuple[str, ...],
    what: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GOOD", SECRET.value.decode())
    monkeypatch.setenv("SHORT", "short")
    if "--http" not in words:
        words = (*words, "--http", "off")
    if "--listen" not in words:
        words = (*words, "--listen", "tcp://127.0.0.1:0")
    assert main(["controller", *(word.format(folder=tmp_path) for word in words)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    head, *_, last = told.err.strip().splitlines()
    assert what in head
    assert last.startswith("  fix  ")
    assert fix in last


@pytest.mark.parametrize(
    "words",
    [("--listen", "localhost:9900"), ("--http", "somewhere"), ("--limit", "10"), ("--max-instances", "0")],
)
def test_options_that_cannot_be_read_are_a_usage_error(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["controller", *words])
    assert ended.value.code == 2
    assert f"argument {words[0]}" in capsys.readouterr().err


def test_a_status_without_a_controller_is_one_error_within_the_deadline(
    capsys: pytest.CaptureFixture[str],
) -> None:
    began = time.monotonic()
    assert main(["controller", "status", "--url", "tcp://127.0.0.1:1", "--timeout", "100ms"]) == 1
    assert time.monotonic() - began < PATIENCE
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[0] == "tcp://127.0.0.1:1: the controller does not answer"
