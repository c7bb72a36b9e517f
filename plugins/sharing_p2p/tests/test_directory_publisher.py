"""What a publisher sends, and when."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from attrs import define, field

from kvferry.api import KVFerryError
from kvferry_sharing_p2p.directory.answers import (
    Progress,
    Refusal,
    RefusalReason,
    Registration,
    Stranger,
    Wanted,
)
from kvferry_sharing_p2p.directory.messages import (
    MAXIMUM_KEYS,
    WIRE_VERSION,
    Accepted,
    Beat,
    BeginAll,
    Bye,
    Changes,
    EndAll,
    Followed,
    Hello,
    Refused,
    Rejected,
    SomeOfAll,
    ToDirectory,
    Unknown,
)
from kvferry_sharing_p2p.directory.publisher import Identity, Publisher, PublisherOptions, PublisherState

EPOCH, SESSION = b"e" * 16, b"s" * 24
KEYS = [hashlib.sha256(number.to_bytes(2, "big")).digest() for number in range(64)]
IDENTITY = Identity(instance="a", epoch=EPOCH, namespace=b"n" * 32, ranks=2, address=b"here")
OPTIONS = PublisherOptions(
    batch_keys=4,
    batch_seconds=0.1,
    backlog_keys=12,
    part_keys=3,
    parts_under_way=2,
    resend_seconds=1.0,
    hello_seconds=1.0,
    rejected_seconds=30.0,
)


@define
class Shelf:
    """All there is, in an order that stays."""

    digests: list[bytes] = field(factory=list)

    def walk(self, cursor: int, limit: int) -> tuple[bytes, int | None]:
        end = cursor + limit
        return b"".join(self.digests[cursor:end]), end if end < len(self.digests) else None


def publisher_of(*digests: bytes) -> Publisher:
    return Publisher(IDENTITY, Shelf(list(digests)), OPTIONS)


def accept(publisher: Publisher, now: float = 0.0, session: bytes = SESSION, applied: int = 0) -> None:
    """The hello is answered."""
    (hello,) = publisher.poll(now)
    assert isinstance(hello, Hello)
    registration = Registration(
        session=session,
        heartbeat_seconds=5.0,
        limit_seconds=20.0,
        applied=applied,
        wanted=Wanted.SNAPSHOT,
    )
    publisher.receive(Accepted(epoch=EPOCH, attempt=hello.attempt, registration=registration), now)


def follow(
    publisher: Publisher,
    applied: int,
    now: float = 0.0,
    wanted: Wanted = Wanted.NOTHING,
    session: bytes = SESSION,
) -> None:
    progress = Progress(session=session, applied=applied, wanted=wanted)
    publisher.receive(Followed(progress=progress), now)


def current(*digests: bytes) -> tuple[Publisher, int]:
    """A publisher whose keys have arrived, and its last sequence number."""
    publisher = publisher_of(*digests)
    accept(publisher)
    last = 0
    while numbers := [message.sequence for message in publisher.poll(0.0)]:  # type: ignore[union-attr]
        last = numbers[-1]
        follow(publisher, last)
    assert publisher.status(0.0).state is PublisherState.CURRENT
    return publisher, last


def kinds(messages: Sequence[ToDirectory]) -> list[type]:
    return [type(message) for message in messages]


def changes(messages: Sequence[ToDirectory]) -> list[tuple[int, set[bytes], set[bytes]]]:
    """Sequence number, added and removed of each batch."""
    return [
        (message.sequence, split(message.added), split(message.removed))
        for message in messages
        if isinstance(message, Changes)
    ]


def split(digests: bytes) -> set[bytes]:
    return {digests[at : at + 32] for at in range(0, len(digests), 32)}


def test_a_hello_is_repeated_until_it_is_answered() -> None:
    publisher = publisher_of()
    (first,) = publisher.poll(0.0)
    assert isinstance(first, Hello)
    assert (first.instance, first.epoch, first.ranks, first.address) == ("a", EPOCH, 2, b"here")
    assert publisher.due() == 1.0
    assert publisher.poll(0.9) == []
    (second,) = publisher.poll(1.0)
    assert isinstance(second, Hello)
    assert second.attempt != first.attempt
    assert publisher.status(1.0).state is PublisherState.SEEKING
    assert publisher.status(1.0).heard_seconds == float("inf")


def test_only_the_answer_to_the_last_hello_counts() -> None:
    publisher = publisher_of()
    publisher.poll(0.0)
    publisher.poll(1.0)
    registration = Registration(
        session=SESSION, heartbeat_seconds=5.0, limit_seconds=20.0, applied=0, wanted=Wanted.SNAPSHOT
    )
    publisher.receive(Accepted(epoch=EPOCH, attempt=1, registration=registration), 1.0)
    publisher.receive(Accepted(epoch=b"x" * 16, attempt=2, registration=registration), 1.0)
    assert publisher.status(1.0).state is PublisherState.SEEKING
    publisher.receive(Accepted(epoch=EPOCH, attempt=2, registration=registration), 1.0)
    assert publisher.status(1.0).state is PublisherState.RESYNCING


def test_a_refusal_is_told_and_the_time_it_names_is_kept() -> None:
    publisher = publisher_of()
    publisher.poll(0.0)
    refusal = Refusal(reason=RefusalReason.TAKEN, text="another one lives", retry_seconds=7.0)
    publisher.receive(Refused(epoch=EPOCH, attempt=1, refusal=refusal), 0.5)
    assert publisher.status(1.0).state is PublisherState.REFUSED
    assert publisher.status(1.0).refusal == "another one lives"
    assert publisher.due() == 7.5
    assert publisher.poll(7.4) == []
    assert kinds(publisher.poll(7.5)) == [Hello]


def test_a_directory_of_another_release_is_asked_again_much_later() -> None:
    publisher, _ = current()
    publisher.receive(Rejected(version=2, reason="a message of version 1 came"), 1.0)
    assert publisher.status(1.0).state is PublisherState.REFUSED
    assert "version 1" in publisher.status(1.0).refusal
    assert publisher.poll(30.9) == []
    assert kinds(publisher.poll(31.0)) == [Hello]


def test_one_message_that_is_not_understood_does_not_end_the_session() -> None:
    publisher, last = current()
    publisher.receive(Rejected(version=WIRE_VERSION, reason="too many keys"), 1.0)
    assert publisher.status(1.0).state is PublisherState.CURRENT
    assert publisher.status(1.0).refusal == "too many keys"
    publisher.added(KEYS[:4], 1.0)
    assert [batch[0] for batch in changes(publisher.poll(1.0))] == [last + 1]


def test_everything_is_told_in_parts_and_only_some_of_them_are_under_way() -> None:
    publisher = publisher_of(*KEYS[:10])
    accept(publisher)
    first = publisher.poll(0.0)
    assert kinds(first) == [BeginAll, SomeOfAll, SomeOfAll]
    assert publisher.poll(0.0) == []
    follow(publisher, 2)
    assert publisher.due() <= 0.0
    second = publisher.poll(0.0)
    assert kinds(second) == [SomeOfAll]
    follow(publisher, 4)
    last = publisher.poll(0.0)
    assert kinds(last) == [SomeOfAll, EndAll]
    told = [message for message in [*first, *second, *last] if isinstance(message, SomeOfAll)]
    assert b"".join(message.digests for message in told) == b"".join(KEYS[:10])
    assert [message.sequence for message in [*first, *second, *last]] == [1, 2, 3, 4, 5, 6]  # type: ignore[union-attr]
    assert publisher.status(0.0).state is PublisherState.RESYNCING
    follow(publisher, 6)
    assert publisher.status(0.0).state is PublisherState.CURRENT


def test_changes_go_on_while_everything_is_told() -> None:
    publisher = publisher_of(*KEYS[:10])
    accept(publisher)
    publisher.poll(0.0)
    publisher.added(KEYS[20:22], 0.0)
    publisher.removed(KEYS[:1], 0.0)
    assert changes(publisher.poll(0.1)) == [(4, set(KEYS[20:22]), {KEYS[0]})]


def test_a_batch_goes_when_it_is_full_or_old_enough() -> None:
    publisher, last = current()
    publisher.added(KEYS[:3], 1.0)
    assert publisher.poll(1.05) == []
    assert publisher.due() == pytest.approx(1.1)
    assert changes(publisher.poll(1.1)) == [(last + 1, set(KEYS[:3]), set())]
    publisher.added(KEYS[3:8], 1.2)
    assert changes(publisher.poll(1.2)) == [(last + 2, set(KEYS[3:7]), set())]
    assert changes(publisher.poll(1.3)) == [(last + 3, {KEYS[7]}, set())]


def test_the_last_change_of_a_key_counts() -> None:
    publisher, last = current()
    publisher.added([KEYS[0], KEYS[1]], 1.0)
    publisher.removed([KEYS[0]], 1.0)
    publisher.removed([KEYS[2]], 1.0)
    publisher.added([KEYS[2]], 1.0)
    assert changes(publisher.poll(1.1)) == [(last + 1, {KEYS[1], KEYS[2]}, {KEYS[0]})]


def test_what_is_not_answered_is_sent_again_the_oldest_first() -> None:
    publisher, last = current()
    publisher.added(KEYS[:8], 1.0)
    assert [batch[0] for batch in changes(publisher.poll(1.0))] == [last + 1, last + 2]
    assert publisher.poll(1.9) == []
    assert [batch[0] for batch in changes(publisher.poll(2.0))] == [last + 1]
    follow(publisher, last + 2, 2.1)
    assert publisher.status(2.1).unacknowledged == 0
    assert publisher.poll(4.0) == []


def test_after_a_gap_all_that_follows_is_sent_again_once() -> None:
    publisher, last = current()
    publisher.added(KEYS[:12], 1.0)
    assert len(changes(publisher.poll(1.0))) == 3
    follow(publisher, last, 1.1, Wanted.CHANGES)
    follow(publisher, last, 1.1, Wanted.CHANGES)
    assert [batch[0] for batch in changes(publisher.poll(1.1))] == [last + 1, last + 2, last + 3]
    follow(publisher, last, 1.2, Wanted.CHANGES)
    assert publisher.poll(1.2) == []
    follow(publisher, last + 1, 1.3, Wanted.CHANGES)
    assert [batch[0] for batch in changes(publisher.poll(1.3))] == [last + 2, last + 3]


def test_answers_from_before_the_last_one_and_of_other_sessions_are_passed_over() -> None:
    publisher, last = current()
    publisher.added(KEYS[:4], 1.0)
    publisher.poll(1.0)
    follow(publisher, last + 1, 1.1)
    follow(publisher, last, 1.2, Wanted.CHANGES)
    follow(publisher, last, 1.2, Wanted.SNAPSHOT)
    follow(publisher, last + 1, 1.2, Wanted.SNAPSHOT, session=b"x" * 24)
    follow(publisher, last + 9, 1.2, Wanted.SNAPSHOT)
    publisher.receive(Unknown(stranger=Stranger(session=b"x" * 24)), 1.2)
    assert publisher.poll(1.2) == []
    assert publisher.status(1.2).state is PublisherState.CURRENT


def test_everything_is_told_again_when_it_is_asked_for_but_not_while_it_is_on_its_way() -> None:
    publisher, last = current(*KEYS[:2])
    publisher.added(KEYS[5:6], 1.0)
    follow(publisher, last, 1.0, Wanted.SNAPSHOT)
    messages = publisher.poll(1.0)
    assert kinds(messages) == [BeginAll, SomeOfAll, EndAll], "what the walk finds is not told as a change"
    follow(publisher, last, 1.1, Wanted.SNAPSHOT)
    assert publisher.poll(1.1) == []
    follow(publisher, last + 1, 1.2, Wanted.SNAPSHOT)
    assert kinds(publisher.poll(1.2)) == [BeginAll, SomeOfAll, EndAll]


def test_changes_that_nobody_can_name_make_everything_be_told() -> None:
    publisher, _ = current(*KEYS[:2])
    publisher.changes_lost()
    assert publisher.status(1.0).state is PublisherState.RESYNCING
    assert publisher.due() <= 1.0
    assert kinds(publisher.poll(1.0)) == [BeginAll, SomeOfAll, EndAll]


def test_a_backlog_has_an_end_and_nothing_is_told_anew_to_who_does_not_answer() -> None:
    publisher, last = current(*KEYS[:2])
    for number in range(13):
        publisher.added([KEYS[number]], 1.0)
        publisher.poll(1.0)
    status = publisher.status(1.0)
    assert (status.overflows, status.gathered_keys, status.unacknowledged) == (1, 0, 0)
    publisher.added(KEYS[:40], 1.0)
    assert publisher.poll(2.0) == []
    publisher.changes_lost()
    assert publisher.poll(2.0) == []
    assert publisher.status(2.0).gathered_keys == 0
    assert kinds(publisher.poll(5.0)) == [Beat]
    assert publisher.due() > 5.0
    follow(publisher, last + 1, 5.1, Wanted.CHANGES)
    assert kinds(publisher.poll(5.1)) == [BeginAll, SomeOfAll, EndAll]


def test_a_heartbeat_says_how_far_messages_have_been_sent() -> None:
    publisher, last = current()
    publisher.added(KEYS[:4], 4.9)
    publisher.poll(4.9)
    assert publisher.due() == 5.0
    assert publisher.poll(5.0) == [Beat(session=SESSION, sequence=last + 1)]
    assert Beat not in kinds(publisher.poll(9.9))
    assert Beat in kinds(publisher.poll(10.0))


def test_a_way_that_is_there_again_is_used_at_once() -> None:
    publisher, _ = current()
    publisher.reconnected(2.0)
    assert kinds(publisher.poll(2.0)) == [Beat]
    seeking = publisher_of()
    seeking.poll(0.0)
    seeking.reconnected(0.2)
    assert kinds(seeking.poll(0.2)) == [Hello]


def test_a_directory_that_does_not_know_the_session_is_told_everything_under_a_new_one() -> None:
    publisher, last = current(*KEYS[:2])
    publisher.added(KEYS[2:3], 1.0)
    publisher.receive(Unknown(stranger=Stranger(session=SESSION)), 1.0)
    publisher.added(KEYS[3:4], 1.0)
    accept(publisher, 1.0, session=b"t" * 24)
    messages = publisher.poll(1.0)
    assert kinds(messages) == [BeginAll, SomeOfAll, EndAll]
    assert {message.session for message in messages} == {b"t" * 24}  # type: ignore[union-attr]
    follow(publisher, last + 3, 1.1, session=b"t" * 24)
    assert publisher.status(1.1).state is PublisherState.CURRENT
    assert publisher.status(1.1).gathered_keys == 0


def test_a_second_publisher_of_one_epoch_goes_on_far_behind_what_the_first_has_said() -> None:
    publisher = publisher_of(KEYS[0])
    accept(publisher, applied=41)
    begin = publisher.poll(0.0)[0]
    assert isinstance(begin, BeginAll)
    assert begin.sequence > 41 + 1_000_000, "what the first has sent may be under way"


def test_who_leaves_says_so_once() -> None:
    publisher, _ = current()
    assert publisher.leave() == [Bye(session=SESSION)]
    publisher.added(KEYS[:4], 1.0)
    publisher.receive(Unknown(stranger=Stranger(session=SESSION)), 1.0)
    assert publisher.poll(100.0) == []
    assert publisher.due() == float("inf")
    assert publisher.leave() == []
    assert publisher_of().leave() == []
    assert publisher.status(1.0).state is PublisherState.LEFT


@pytest.mark.parametrize("name", ["batch_keys", "part_keys"])
def test_batches_that_no_message_carries_are_refused(name: str) -> None:
    with pytest.raises(KVFerryError, match=name):
        PublisherOptions(**{name: MAXIMUM_KEYS + 1})
