"""What the directory promises of each event."""

from __future__ import annotations

import hashlib

import pytest

from kvferry.api import ErrorKind, KVFerryError
from kvferry_sharing_p2p.directory.answers import (
    DirectoryOptions,
    Progress,
    Refusal,
    RefusalReason,
    Registration,
    Stranger,
    SyncState,
    Wanted,
)
from kvferry_sharing_p2p.directory.state import Directory

SPACE, OTHER = b"s" * 32, b"o" * 32
KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(12)]
OPTIONS = DirectoryOptions(heartbeat_seconds=1.0, limit_seconds=4.0, resync_seconds=3.0)


def blob(*numbers: int) -> bytes:
    return b"".join(KEYS[number] for number in numbers)


def epoch(number: int) -> bytes:
    return bytes([number]) * 16


@pytest.fixture
def directory() -> Directory:
    return Directory(OPTIONS, epoch(255), 0.0)


def registered(directory: Directory, name: str, now: float = 0.0, namespace: bytes = SPACE) -> bytes:
    answer = directory.register(name, epoch(1), namespace, 2, name.encode(), now)
    assert isinstance(answer, Registration)
    return answer.session


def filled(directory: Directory, name: str, *numbers: int, namespace: bytes = SPACE) -> bytes:
    """A session with these keys, of which three messages have taken effect."""
    session = registered(directory, name, namespace=namespace)
    directory.begin(session, 1, 0.0)
    directory.add(session, 2, blob(*numbers), 0.0)
    directory.end(session, 3, 0.0)
    return session


def names(
    directory: Directory, *numbers: int, asker: str = "z", now: float = 0.0, limit: int = 3
) -> list[str]:
    """Who is named, each with how much of the prefix it has."""
    found = directory.find(SPACE, blob(*numbers), asker, now, limit)
    return [f"{holder.instance}{holder.chunks}" for holder in found.holders]


def applied(answer: Progress | Stranger) -> tuple[int, Wanted]:
    assert isinstance(answer, Progress)
    return answer.applied, answer.wanted


def test_a_registration_says_what_is_expected(directory: Directory) -> None:
    answer = directory.register("a", epoch(1), SPACE, 2, b"here", 0.0)
    assert isinstance(answer, Registration)
    assert (answer.heartbeat_seconds, answer.limit_seconds) == (1.0, 4.0)
    assert (answer.applied, answer.wanted) == (0, Wanted.SNAPSHOT)


def test_the_same_registration_again_keeps_everything(directory: Directory) -> None:
    session = filled(directory, "a", 0, 1)
    again = directory.register("a", epoch(1), SPACE, 2, b"a", 1.0)
    assert isinstance(again, Registration)
    assert (again.session, again.applied, again.wanted) == (session, 3, Wanted.NOTHING)
    assert names(directory, 0, 1) == ["a2"]


@pytest.mark.parametrize(
    ("namespace", "ranks", "address"), [(OTHER, 2, b"a"), (SPACE, 4, b"a"), (SPACE, 2, b"elsewhere")]
)
def test_one_life_cannot_say_two_things_of_itself(
    directory: Directory, namespace: bytes, ranks: int, address: bytes
) -> None:
    filled(directory, "a", 0)
    answer = directory.register("a", epoch(1), namespace, ranks, address, 1.0)
    assert isinstance(answer, Refusal)
    assert answer.reason is RefusalReason.CONTRADICTION
    assert names(directory, 0) == ["a1"]


def test_another_epoch_waits_until_the_living_one_is_overdue_and_then_starts_with_nothing(
    directory: Directory,
) -> None:
    session = filled(directory, "a", 0, 1)
    directory.heartbeat(session, 3, 2.0)
    refused = directory.register("a", epoch(2), SPACE, 2, b"a", 3.0)
    assert isinstance(refused, Refusal)
    assert refused.reason is RefusalReason.TAKEN
    assert refused.retry_seconds == pytest.approx(3.0)
    assert "1.0 s ago" in refused.text
    assert isinstance(directory.register("a", epoch(2), SPACE, 2, b"a", 6.0), Refusal), "not overdue yet"

    taken = directory.register("a", epoch(2), SPACE, 2, b"a", 6.1)
    assert isinstance(taken, Registration)
    assert names(directory, 0, 1, now=6.1) == []
    assert directory.change(session, 4, blob(5), b"", 6.2) == Stranger(session=session)
    assert directory.heartbeat(session, 4, 6.2) == Stranger(session=session)
    assert names(directory, 5, now=6.2) == []
    directory.audit()


def test_who_leaves_frees_its_name_at_once(directory: Directory) -> None:
    directory.leave(filled(directory, "a", 0), 1.0)
    assert names(directory, 0) == []
    assert isinstance(directory.register("a", epoch(2), SPACE, 2, b"a", 1.0), Registration)
    directory.leave(b"?" * 24, 1.0)


def test_who_is_not_heard_leaves_with_its_keys_and_is_counted(directory: Directory) -> None:
    filled(directory, "a", 0, 1, 2)
    session = filled(directory, "b", 0)
    directory.heartbeat(session, 3, 3.0)
    assert names(directory, 0, 1, 2, now=4.0) == ["a3", "b1"]
    assert names(directory, 0, 1, 2, now=4.1) == ["b1"]
    status = directory.status(4.1)
    assert [each.instance for each in status.instances] == ["b"]
    assert (status.totals.expired_instances, status.totals.expired_keys, status.keys) == (1, 3, 1)
    directory.audit()
    assert directory.status(7.1).instances == ()
    assert directory.status(7.1).memory_bytes == 0


def test_every_message_of_an_instance_is_a_sign_of_life(directory: Directory) -> None:
    session = filled(directory, "a", 0)
    for turn in range(4):
        directory.change(session, 4 + turn, blob(1), b"", 3.0 * (turn + 1))
    assert names(directory, 0, 1, now=15.0) == ["a2"]


def test_changes_take_effect_in_order_and_once(directory: Directory) -> None:
    session = filled(directory, "a", 0)
    assert applied(directory.change(session, 4, blob(1, 2), b"", 0.0)) == (4, Wanted.NOTHING)
    assert applied(directory.change(session, 5, b"", blob(2), 0.0)) == (5, Wanted.NOTHING)
    assert applied(directory.change(session, 4, blob(1, 2), b"", 0.0)) == (5, Wanted.NOTHING)
    assert names(directory, 0, 1, 2) == ["a2"], "an old message came again and took effect"
    assert applied(directory.change(session, 7, blob(3), b"", 0.0)) == (5, Wanted.CHANGES)
    assert names(directory, 3) == [], "a message took effect before the one ahead of it"
    assert directory.status(0.0).instances[0].lag == 2
    assert applied(directory.change(session, 6, blob(2), b"", 0.0)) == (6, Wanted.CHANGES)
    assert applied(directory.change(session, 7, blob(3), b"", 0.0)) == (7, Wanted.NOTHING)
    assert names(directory, 0, 1, 2, 3) == ["a4"]
    totals = directory.status(0.0).totals
    assert (totals.duplicates, totals.gaps) == (1, 1)


def test_a_heartbeat_tells_of_a_batch_that_was_lost(directory: Directory) -> None:
    session = filled(directory, "a", 0)
    assert applied(directory.heartbeat(session, 3, 1.0)) == (3, Wanted.NOTHING)
    assert applied(directory.heartbeat(session, 5, 1.0)) == (3, Wanted.CHANGES)
    assert directory.status(1.0).instances[0].lag == 2


def test_the_old_set_is_served_and_followed_until_the_new_one_is_whole(directory: Directory) -> None:
    session = filled(directory, "a", 0, 1, 2)
    directory.begin(session, 9, 3.0)
    assert names(directory, 0, 1, 2, now=3.0) == ["a3"]
    directory.add(session, 10, blob(0, 4), 3.0)
    directory.change(session, 11, blob(3), blob(4), 3.0)
    status = directory.status(3.0).instances[0]
    assert (status.sync, status.keys, status.incoming_keys) == (SyncState.RUNNING, 4, 2)
    assert names(directory, 0, 1, 2, 3, now=3.0) == ["a4"]
    assert names(directory, 4, now=3.0) == []
    assert directory.find(SPACE, blob(0), "z", 5.0).settled is False
    directory.add(session, 12, blob(1), 5.0)
    assert applied(directory.end(session, 13, 5.0)) == (13, Wanted.NOTHING)
    assert set(directory.keys_of("a")) == {KEYS[0], KEYS[1], KEYS[3]}
    assert directory.find(SPACE, blob(0), "z", 5.0).settled is True
    directory.audit()


def test_beginning_anew_leaves_nothing_of_the_half_that_was_there(directory: Directory) -> None:
    session = filled(directory, "a", 0)
    directory.begin(session, 4, 1.0)
    directory.add(session, 5, blob(5, 6), 1.0)
    directory.begin(session, 8, 1.0)
    directory.add(session, 9, blob(1), 1.0)
    directory.end(session, 10, 1.0)
    assert set(directory.keys_of("a")) == {KEYS[1]}
    assert directory.status(1.0).totals.abandoned_resyncs == 1
    assert directory.status(1.0).keys == 1
    directory.audit()


def test_a_resynchronisation_that_stands_still_is_given_up_and_asked_for_again(directory: Directory) -> None:
    session = filled(directory, "a", 0)
    directory.begin(session, 4, 1.0)
    directory.add(session, 5, blob(5), 2.0)
    assert applied(directory.heartbeat(session, 5, 5.0)) == (5, Wanted.NOTHING)
    assert applied(directory.heartbeat(session, 5, 5.1)) == (5, Wanted.SNAPSHOT)
    assert names(directory, 0, now=5.1) == ["a1"], "what was served before still is"
    assert applied(directory.end(session, 6, 5.1)) == (5, Wanted.SNAPSHOT), "half a set was put in place"
    assert names(directory, 0, now=5.1) == ["a1"]
    assert applied(directory.change(session, 6, blob(5), b"", 5.1)) == (5, Wanted.SNAPSHOT)
    assert names(directory, 5, now=5.1) == [], "changes took effect on a set that may be outdated"
    directory.audit()
    assert directory.status(5.1).keys == 1


def test_a_part_that_nothing_began_asks_for_everything(directory: Directory) -> None:
    session = filled(directory, "a", 0)
    assert applied(directory.add(session, 4, blob(1), 0.0)) == (3, Wanted.SNAPSHOT)
    assert names(directory, 1) == []


def test_the_longest_beginning_wins_and_the_asker_is_never_named(directory: Directory) -> None:
    filled(directory, "a", 0, 1, 2)
    filled(directory, "b", 0, 1, 3, 4, 5)
    filled(directory, "c", 1, 2, 3, 4, 5)
    filled(directory, "d", 0, 1, 2, 3, 4, namespace=OTHER)
    assert names(directory, 0, 1, 2, 3, 4) == ["a3", "b2"]
    assert names(directory, 0, 1, 2, 3, 4, limit=1) == ["a3"]
    assert names(directory, 0, 1, 2, 3, 4, asker="a") == ["b2"]
    assert names(directory, 1, 2, 3, asker="a") == ["c3", "b1"]
    assert names(directory, 6) == []
    assert names(directory) == []
    (holder,) = directory.find(OTHER, blob(0, 1), "a", 0.0).holders
    assert (holder.instance, holder.epoch, holder.address, holder.ranks, holder.chunks) == (
        "d",
        epoch(1),
        b"d",
        2,
        2,
    )


def test_equals_take_turns(directory: Directory) -> None:
    for name in "abc":
        filled(directory, name, 0, 1)
    filled(directory, "d", 0)
    turns = [names(directory, 0, 1, limit=1)[0] for _ in range(9)]
    assert [turns[at : at + 3] for at in (0, 3, 6)] == [["a2", "b2", "c2"]] * 3
    assert [each.handed_out for each in directory.status(0.0).instances] == [3, 3, 3, 0]


def test_a_directory_or_an_instance_that_has_just_started_is_not_settled(directory: Directory) -> None:
    session = filled(directory, "a", 0)
    assert directory.find(SPACE, blob(0), "z", 3.9).settled is False, "others may not have found it yet"
    directory.heartbeat(session, 3, 3.9)
    assert directory.find(SPACE, blob(0), "z", 4.0).settled is True
    registered(directory, "b", now=4.0)
    assert directory.find(SPACE, blob(0), "z", 4.0).settled is False
    assert directory.find(OTHER, blob(0), "z", 4.0).settled is True


def test_more_instances_than_the_limit_are_refused() -> None:
    directory = Directory(DirectoryOptions(max_instances=1), epoch(255), 0.0)
    session = registered(directory, "a")
    refused = directory.register("b", epoch(1), SPACE, 2, b"b", 0.0)
    assert isinstance(refused, Refusal)
    assert refused.reason is RefusalReason.FULL
    directory.leave(session, 0.0)
    registered(directory, "b")


def test_half_a_digest_is_refused_before_anything_happens(directory: Directory) -> None:
    session = filled(directory, "a", 0)
    with pytest.raises(ValueError):
        directory.change(session, 4, blob(1), b"x", 0.0)
    with pytest.raises(ValueError):
        directory.find(SPACE, b"x", "z", 0.0)
    assert names(directory, 1) == []
    assert applied(directory.heartbeat(session, 3, 0.0)) == (3, Wanted.NOTHING)


def test_a_limit_that_one_lost_heartbeat_exceeds_is_refused() -> None:
    with pytest.raises(KVFerryError) as raised:
        DirectoryOptions(heartbeat_seconds=3.0, limit_seconds=5.0)
    assert raised.value.kind is ErrorKind.CONFIG
    DirectoryOptions()


def test_the_next_moment_to_look_is_known(directory: Directory) -> None:
    assert directory.next_due() == float("inf")
    session = filled(directory, "a", 0)
    assert directory.next_due() <= 4.0
    directory.heartbeat(session, 3, 3.0)
    directory.status(4.1)
    assert 4.1 < directory.next_due() <= 7.0
    directory.status(7.1)
    assert directory.next_due() == float("inf")
