"""The law about a process that is killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import traceback
import warnings

from kvferry.api import ReadStatus, WriteStatus
from kvferry.testing.conformance.base import needs
from kvferry.testing.conformance.driver import expect_status, told
from kvferry.testing.conformance.keyed_subject import KeyedSubject, Workbench

_CHUNKS = 400
_SIZE = 3000


class CrashLaws(KeyedSubject, kit=True):
    """What holds after the process died in the middle of its work."""

    @needs("persistent")
    def test_a_killed_process_loses_nothing_acknowledged(self, bench: Workbench) -> None:
        """After SIGKILL, at any moment, every chunk that was acknowledged is there, and every other is
        there with the right bytes or is a miss."""
        acknowledged = 0
        for turn, enough in enumerate((1, 7, 30)):
            acknowledged = self._killed_after(bench, enough, first=turn * _CHUNKS)
            again = bench.open()
            chunks = bench.chunks(_CHUNKS, _SIZE, first=turn * _CHUNKS)
            again.expect(chunks[:acknowledged])
            rest = again.read([(header.key, _SIZE) for header, _ in chunks[acknowledged:]])
            for (_, value), found in zip(chunks[acknowledged:], rest, strict=True):
                expect_status(found.result, ReadStatus.FOUND, ReadStatus.MISS)
                assert found.data in (None, value)
            headers = {header.key: header for header, _ in chunks}
            mine = [each for each in again.recovered if each.key in headers]
            assert all(headers[each.key] == each for each in mine)
            assert {each.key for each in mine} >= {header.key for header, _ in chunks[:acknowledged]}
            again.delete([header.key for header, _ in chunks])
            again.close()

    def _killed_after(self, bench: Workbench, enough: int, first: int) -> int:
        """Write chunks one by one in a child and kill it after ``enough``; how many were
        acknowledged."""
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            # No backend is open, so no thread of ours can hold a lock that the child would miss.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os.close(reader)
            self._child(bench, writer, first)
        os.close(writer)
        acknowledged = 0
        deadline = time.monotonic() + self.patience
        try:
            while acknowledged < enough:
                ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
                assert ready, f"the child acknowledged {acknowledged} chunks and went silent"
                data = os.read(reader, 1)
                assert data == b".", f"the child failed to store a chunk: {_rest(reader)}"
                acknowledged += 1
            os.kill(child, signal.SIGKILL)
            meanwhile, _, _ = _rest(reader).partition("!")
            acknowledged += len(meanwhile)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)
        return acknowledged

    def _child(self, bench: Workbench, writer: int, first: int) -> None:
        """Never returns: the child must not run anything that belongs to the parent's test."""
        code = 1
        try:
            driver = bench.open()
            for chunk in bench.chunks(_CHUNKS, _SIZE, first):
                (result,) = driver.write([chunk])
                if result.status is not WriteStatus.STORED:
                    os.write(writer, b"!" + told(result).encode(errors="replace"))
                    return
                os.write(writer, b".")
            signal.pause()
            code = 0
        except BaseException:  # noqa: BLE001 - told to the parent
            os.write(writer, b"!" + traceback.format_exc().encode(errors="replace"))
        finally:
            os._exit(code)


def _rest(reader: int) -> str:
    """What the child says until its end."""
    with open(reader, "rb", closefd=False) as text:
        return text.read().decode(errors="replace")
