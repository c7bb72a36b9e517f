"""The folder where the sides of one engine meet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry.config.fields import MAX_SOCKET_FOLDER_BYTES
from kvferry.runtime.address import MeetingPlace

OWNER = """
import sys, time
from kvferry.runtime.address import MeetingPlace
place = MeetingPlace("engine", sys.argv[1], {})
print(place.claim(), flush=True)
time.sleep(60)
"""


def meeting(folder: Path, name: str = "engine") -> MeetingPlace:
    return MeetingPlace(name, str(folder), {})


def test_both_sides_find_one_secret_in_a_private_folder(folder: Path) -> None:
    place = meeting(folder)
    assert meeting(folder).read_token() is None
    token = place.claim()
    try:
        assert len(token) == 64
        assert meeting(folder).read_token() == token
        assert meeting(folder).endpoint == place.endpoint
        assert place.folder.stat().st_mode & 0o777 == 0o700
        assert (place.folder / "token").stat().st_mode & 0o077 == 0
    finally:
        place.release()
    assert not place.folder.exists()
    place.release()


def test_the_longest_folder_that_a_configuration_admits_has_room_for_a_socket() -> None:
    longest = "/" + "f" * (MAX_SOCKET_FOLDER_BYTES - 1)
    meeting(Path(longest))
    with pytest.raises(KVFerryError, match="too long for a socket"):
        meeting(Path(f"{longest}f"))


def test_engines_with_different_ids_do_not_meet(folder: Path) -> None:
    first, second = meeting(folder, "a_dp0"), meeting(folder, "a_dp1")
    assert first.claim() != second.claim()
    first.release()
    assert second.read_token() is not None
    second.release()


def test_every_claim_has_a_secret_of_its_own(folder: Path) -> None:
    place = meeting(folder)
    tokens = set()
    for _ in range(3):
        tokens.add(place.claim())
        place.release()
    assert len(tokens) == 3


def test_a_second_engine_is_refused_while_the_first_lives_and_follows_it_when_it_is_killed(
    folder: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        token = owner.stdout.readline().strip()
        place = meeting(folder)
        with pytest.raises(KVFerryError) as caught:
            place.claim()
        assert caught.value.kind is ErrorKind.CONFIG
        assert caught.value.retry is Retry.AFTER_CHANGE
        assert "engine_id" in caught.value.remedy
        assert place.read_token() == token, "the first engine's secret was touched"
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    assert place.read_token() == token  # left behind
    assert place.claim() != token
    place.release()


def test_what_killed_engines_left_behind_is_swept_away(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        living = meeting(folder, "living")
        living.claim()
        left = meeting(folder).folder
        other = meeting(folder, "other")
        other.claim()
        other.release()
        assert left.exists(), "a living engine's folder was swept away"
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    other.claim()
    assert not left.exists()
    assert living.folder.exists()
    other.release()
    living.release()


def test_claims_one_after_the_other_never_trip_over_each_other(folder: Path) -> None:
    """Engines come and go while others sweep: nobody is refused for a folder that is free."""
    errors: list[Exception] = []

    def come_and_go(name: str) -> None:
        try:
            for _ in range(40):
                place = meeting(folder, name)
                place.claim()
                assert place.read_token() is not None
                place.release()
        except Exception as error:  # noqa: BLE001 - told by the main thread
            errors.append(error)

    threads = [threading.Thread(target=come_and_go, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_folder_that_others_may_enter_is_refused(folder: Path) -> None:
    place = meeting(folder)
    place.folder.parent.mkdir(mode=0o755)
    place.folder.parent.chmod(0o755)
    with pytest.raises(KVFerryError) as caught:
        place.claim()
    assert caught.value.kind is ErrorKind.CONFIG
    assert "chmod 700" in caught.value.remedy


def test_a_link_in_its_place_is_refused(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    place = meeting(folder)
    place.folder.parent.symlink_to(elsewhere)
    with pytest.raises(KVFerryError):
        place.claim()


def test_a_path_too_long_for_a_socket_is_refused_at_once(folder: Path) -> None:
    with pytest.raises(KVFerryError) as caught:
        meeting(folder / ("x" * 90))
    assert caught.value.kind is ErrorKind.CONFIG
    assert caught.value.where == "runtime_dir"


def test_a_folder_that_cannot_be_made_is_told(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(KVFerryError) as caught:
        meeting(folder / "file").claim()
    assert caught.value.kind is ErrorKind.IO
