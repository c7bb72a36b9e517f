"""A small run of the directory's bench."""

from __future__ import annotations

from tests.bench import directory_socket
from tests.bench.directory import HOLDERS, PROMPT_CHUNKS, run


def test_all_figures_come_from_a_directory_that_knew_every_key() -> None:
    figures = run(keys=16 * PROMPT_CHUNKS, rounds=4)
    assert figures["keys"] == 16 * PROMPT_CHUNKS
    assert figures["holdings"] == HOLDERS * figures["keys"]
    assert all(value > 0 for value in figures.values())


def test_all_figures_of_the_socket_come_from_prompts_that_were_found() -> None:
    figures = directory_socket.run(keys=8 * PROMPT_CHUNKS, rounds=4)
    assert figures["keys"] == 8 * PROMPT_CHUNKS
    assert len(figures) == 7
    assert all(value > 0 for value in figures.values())
