"""One process at a time on one folder: whoever comes second is refused, and the dead hold nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry_backend_ssd.options import IOPath
from plugins.backend_ssd.tests.ssd_children import child
from plugins.backend_ssd.tests.ssd_crash import Rig, chunks


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(path=tmp_path / "store", io=IOPath.THREADS, facts={"operation_seconds": 0.4, "instance": "i"})


def own(rig: Rig) -> Callable[[Callable[[str], None], Callable[[], None]], None]:
    """Work that opens the folder, stores something, and keeps it open."""

    def work(say: Callable[[str], None], wait: Callable[[], None]) -> None:
        driver = rig.open()
        driver.store(chunks([0]))
        say("open")
        wait()
        driver.close()

    return work


def refused(rig: Rig, owner: int) -> None:
    with pytest.raises(KVFerryError) as caught:
        rig.open()
    error = caught.value
    assert error.kind is ErrorKind.IO
    assert error.retry is Retry.LATER
    assert f"process {owner} on {os.uname().nodename}, instance 'i'" in error.why
    assert str(rig.path) in error.where
    assert error.remedy


def test_an_owner_that_is_stopped_still_owns(rig: Rig) -> None:
    """It may wake up and write at any moment: waiting for it ends, and in a refusal."""
    with child(own(rig)) as owner:
        assert owner.line() == "open"
        owner.signal(signal.SIGSTOP)
        os.waitpid(owner.pid, os.WUNTRACED)
        refused(rig, owner.pid)
        owner.signal(signal.SIGCONT)
        refused(rig, owner.pid)


@pytest.mark.parametrize("stopped", [False, True])
def test_an_owner_that_was_killed_does_not(rig: Rig, stopped: bool) -> None:
    with child(own(rig)) as owner:
        assert owner.line() == "open"
        if stopped:
            owner.signal(signal.SIGSTOP)
        owner.signal(signal.SIGKILL)
        driver = rig.open()
    driver.expect(chunks([0]))
    driver.close()


def test_of_eight_that_start_at_once_exactly_one_wins(rig: Rig) -> None:
    def race(say: Callable[[str], None], wait: Callable[[], None]) -> None:
        wait()
        try:
            driver = rig.open()
        except KVFerryError as error:
            say(error.why)
            return
        driver.write(chunks([0]))
        say("won")
        wait()
        driver.close()

    for _ in range(3):
        with ExitStack() as stack:
            racers = [stack.enter_context(child(race)) for _ in range(8)]
            for racer in racers:
                racer.let_go_on()
            said = {racer.pid: racer.line() for racer in racers}
            (winner,) = [pid for pid, line in said.items() if line == "won"]
            others = {line for pid, line in said.items() if pid != winner}
            assert others == {
                f"it is held by process {winner} on {os.uname().nodename}, instance 'i', rank 0"
            }


def test_another_rank_and_another_instance_are_welcome_beside_it(rig: Rig) -> None:
    with child(own(rig)) as owner:
        assert owner.line() == "open"
        for facts in ({"rank": 1}, {"instance": "another"}):
            driver = Rig(path=rig.path, io=rig.io, facts=facts).open()
            assert driver.recovered == []
            driver.close()


def test_a_folder_of_an_owner_who_could_not_sign_is_still_usable(rig: Rig) -> None:
    """The name in the file is for messages alone, and may be anything."""
    rig.open().close()
    (owner,) = rig.path.glob("*/owner")
    for text in (b"", b"\xff" * 5000, b"process 1 on another"):
        owner.write_bytes(text)
        driver = rig.open()
        driver.close()
        assert owner.read_text().startswith(f"process {os.getpid()} on ")
