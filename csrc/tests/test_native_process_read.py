"""process_read: exactly the spans of another process, each with its own outcome."""

from __future__ import annotations

import array
import errno
import mmap
import os
import signal
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvferry_native

POISON = 0xA5
Words = NDArray[np.uint64]


def words(*values: int) -> Words:
    return np.array(values, np.uint64)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 63, 4096, 40_000])), max_size=600),
    st.integers(0, 2**16),
)
def test_reads_exactly_the_spans(pieces: list[tuple[int, int]], seed: int) -> None:
    random = np.random.default_rng(seed)
    total = sum(gap + length for gap, length in pieces) + 1
    source = random.integers(0, 256, total, np.uint8)
    target = np.full(total, POISON, np.uint8)
    expected = target.copy()
    rows, at = [], 0
    for gap, length in pieces:
        at += gap
        expected[at : at + length] = source[at : at + length]
        rows.append((target.ctypes.data + at, source.ctypes.data + at, length))
        at += length
    table = np.array(rows, np.uint64).reshape(-1, 3).T.copy()
    results = np.full(len(rows), 77, np.int64)

    kvferry_native.process_read(os.getpid(), table[0], table[1], table[2], results)

    assert results.tolist() == [length for _, length in pieces]
    assert np.array_equal(target, expected)


def test_a_stopped_process_is_read() -> None:
    with mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:5] = b"older"
        view = np.frombuffer(memory, np.uint8)
        address = view.ctypes.data
        said, say = os.pipe()
        pid = os.fork()
        if pid == 0:
            memory[:5] = b"child"
            os.write(say, b"!")
            signal.pause()
            os._exit(0)
        try:
            assert os.read(said, 1) == b"!"
            os.kill(pid, signal.SIGSTOP)
            target = np.zeros(5, np.uint8)
            results = np.zeros(1, np.int64)
            kvferry_native.process_read(pid, words(target.ctypes.data), words(address), words(5), results)
            assert (results.tolist(), target.tobytes()) == ([5], b"child")
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(said)
            os.close(say)
            del view
        results = np.zeros(2, np.int64)
        kvferry_native.process_read(pid, words(address, address), words(1, 1), words(1, 0), results)
        assert results.tolist() == [-errno.ESRCH, -errno.ESRCH]


@pytest.mark.parametrize(
    ("columns", "results", "error", "text"),
    [
        ((words(1), words(1, 2), words(0)), array.array("q", [0]), ValueError, "remote must have as many"),
        ((words(1), words(1), words(0, 0)), array.array("q", [0]), ValueError, "lengths must have as many"),
        ((words(1), words(1), words(0)), array.array("q", [0, 0]), ValueError, "results must have as many"),
        ((words(1), words(1), words(0)), array.array("Q", [0]), TypeError, "results must hold int64"),
        ((words(1), words(1), words(0)), bytes(8), BufferError, "writable"),
    ],
)
def test_refuses_what_is_malformed(
    columns: tuple[Words, Words, Words], results: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        kvferry_native.process_read(os.getpid(), *columns, results)  # type: ignore[arg-type]


def test_other_threads_run_during_a_read(lets_others_run: Callable[[Callable[[], object]], bool]) -> None:
    source, target = np.ones(64 << 20, np.uint8), np.zeros(64 << 20, np.uint8)
    columns = (words(target.ctypes.data), words(source.ctypes.data), words(len(source)))
    results = np.zeros(1, np.int64)
    assert lets_others_run(lambda: kvferry_native.process_read(os.getpid(), *columns, results))
    assert target.all()
