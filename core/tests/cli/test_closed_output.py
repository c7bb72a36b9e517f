"""``kvferry ... | head -1``: nobody reads on, and nobody complains."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvferry.cli.pipes import CLOSED_PIPE, quiet_when_closed

from .conftest import CommandLine

COMMAND = (sys.executable, "-c", "import sys; from kvferry.cli.main import main; sys.exit(main())")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words", [("rules",), ("check", "c.yaml"), ("config", "show", "c.yaml"), ("--help",), ("chek",)]
)
def test_a_reader_that_has_gone_ends_the_command_without_a_word(
    shell: CommandLine, words: tuple[str, ...], unbuffered: str
) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    shell.write("tiers: {}\n")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, *words], cwd=shell.root, stdout=writing, stderr=subprocess.PIPE, env=environment
        )
    finally:
        os.close(writing)
    if words == ("chek",):
        # Nothing was written there, so nothing is missing.
        assert (done.returncode, b"no command" in done.stderr) == (2, True)
    else:
        assert (done.returncode, done.stderr) == (CLOSED_PIPE, b"")


def test_another_broken_connection_is_an_error_like_any_other() -> None:
    def hang_up() -> int:
        raise BrokenPipeError("a peer")

    with pytest.raises(BrokenPipeError, match="a peer"):
        quiet_when_closed(hang_up)
