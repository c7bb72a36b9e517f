"""An instance's connection to the directory, over real sockets inside of one process."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
from collections import Counter

import pytest

from kvferry.api import ErrorKind, KVFerryError
from kvferry_sharing_p2p.directory.answers import Found
from kvferry_sharing_p2p.directory.messages import MAXIMUM_KEYS
from kvferry_sharing_p2p.directory.publisher import Identity, PublisherOptions, PublisherState
from kvferry_sharing_p2p.network.asking import ask_status
from kvferry_sharing_p2p.network.endpoint import Endpoint
from kvferry_sharing_p2p.network.finds import MOST_FINDS, Unanswered
from kvferry_sharing_p2p.network.lookup import controller_lookup
from kvferry_sharing_p2p.network.options import ControllerOptions
from kvferry_sharing_p2p.network.reach import Reach
from kvferry_sharing_p2p.network.sockets import QUEUED_MESSAGES
from plugins.sharing_p2p.tests.controller_sides import (
    PATIENCE,
    SECRET,
    SPACE,
    Instance,
    prompt,
    serving,
    until,
)
from plugins.sharing_p2p.tests.mute_directory import MuteDirectory

NOBODY = Endpoint("127.0.0.1", 1)


def test_many_threads_find_and_publish_at_the_same_time() -> None:
    with serving(SECRET) as endpoint, Instance("b", endpoint, SECRET) as b:
        b.store(prompt(200))
        with Instance("a", endpoint, SECRET) as a:
            a.settle()
            a.sees(prompt(200), {"b": 8})
            answers: queue.SimpleQueue[tuple[int, int, Found | Unanswered]] = queue.SimpleQueue()

            def work(number: int) -> None:
                for turn in range(50):
                    a.store([bytes([number, turn]) * 16])
                    a.client.find(
                        SPACE,
                        b"".join(prompt(200)),
                        1,
                        time.monotonic() + PATIENCE,
                        lambda found, turn=turn: answers.put((number, turn, found)),  # type: ignore[misc]
                    )

            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seen: Counter[tuple[int, int]] = Counter()
            outcomes: Counter[str] = Counter()
            for _ in range(200):
                number, turn, found = answers.get(timeout=PATIENCE)
                seen[number, turn] += 1
                if isinstance(found, Found):
                    assert [(each.instance, each.chunks) for each in found.holders] == [("b", 8)]
                outcomes[found.value if isinstance(found, Unanswered) else "found"] += 1
            assert set(seen.values()) == {1}
            assert len(seen) == 200
            # The connection has room for so many at once; beyond that it may be too busy.
            assert outcomes["found"] >= QUEUED_MESSAGES // 2
            assert set(outcomes) <= {"found", "busy"}
            # Whatever was lost for lack of room on the way is there in the end.
            for number in range(4):
                for turn in (0, 49):
                    b.sees([bytes([number, turn]) * 16], {"a": 1})


def test_without_a_directory_finds_are_missed_at_once_and_status_says_why() -> None:
    with Instance("a", NOBODY) as a:
        assert a.find(prompt(1)) is Unanswered.GONE
        a.store(prompt(1))
        status = a.client.status()
        assert status.reach is Reach.NO_ANSWER
        assert status.publisher.state is PublisherState.SEEKING
        assert status.finds == 0
    assert a.client.status().reach is Reach.CLOSED


def test_a_directory_that_was_asked_nothing_is_not_taken_for_silent() -> None:
    with serving(heartbeat_seconds=PATIENCE) as endpoint, Instance("a", endpoint, silent_seconds=0.3) as a:
        a.settle()
        assert isinstance(a.find(prompt(1)), Found)
        time.sleep(0.5)
        assert a.client.status().reach is Reach.CONNECTED
        assert isinstance(a.find(prompt(1)), Found)


def test_an_overdue_find_is_not_asked() -> None:
    with serving() as endpoint, Instance("a", endpoint) as a:
        a.settle()
        assert a.find(prompt(1), seconds=0.0) is Unanswered.DEADLINE
        assert isinstance(a.find(prompt(1)), Found)
        told = ask_status(endpoint, None, PATIENCE, random=os.urandom).status
        assert told.totals.lookups == 1


def test_closing_ends_each_find_exactly_once_and_takes_no_more() -> None:
    with MuteDirectory() as mute, Instance("a", mute.endpoint) as a:
        until(lambda: a.client.status().reach is Reach.CONNECTED, "it is connected")
        answers: queue.SimpleQueue[Found | Unanswered] = queue.SimpleQueue()
        for _ in range(20):
            a.client.find(SPACE, b"".join(prompt(1)), 1, time.monotonic() + PATIENCE, answers.put)
        until(lambda: a.client.status().finds == 20, "all are under way")
        assert answers.empty()
        a.client.close(time.monotonic() + PATIENCE)
        assert [answers.get(timeout=0) for _ in range(20)] == [Unanswered.CLOSED] * 20
        assert answers.empty()
        with pytest.raises(KVFerryError) as refused:
            a.client.find(SPACE, b"", 1, time.monotonic() + PATIENCE, answers.put)
        assert refused.value.kind is ErrorKind.CLOSED
        a.client.added(prompt(2))
        a.client.close(time.monotonic())
        assert answers.empty()
        with pytest.raises(KVFerryError, match="opened once"):
            a.client.open()


def test_deadlines_are_kept_in_their_order_by_a_directory_that_says_nothing() -> None:
    with MuteDirectory() as mute, Instance("a", mute.endpoint) as a:
        until(lambda: a.client.status().reach is Reach.CONNECTED, "it is connected")
        answers: queue.SimpleQueue[tuple[int, Found | Unanswered]] = queue.SimpleQueue()
        now = time.monotonic()
        for number, seconds in enumerate((PATIENCE, 0.3, 0.1, 0.2)):
            a.client.find(
                SPACE,
                b"".join(prompt(1)),
                1,
                now + seconds,
                lambda found, number=number: answers.put((number, found)),  # type: ignore[misc]
            )
        ended = [answers.get(timeout=PATIENCE) for _ in range(3)]
        assert ended == [(number, Unanswered.DEADLINE) for number in (2, 3, 1)]
        assert time.monotonic() >= now + 0.3
        assert a.client.status().finds <= 1


def test_more_finds_than_there_is_room_for_are_refused_and_none_is_lost() -> None:
    with MuteDirectory() as mute, Instance("a", mute.endpoint, silent_seconds=PATIENCE) as a:
        until(lambda: a.client.status().reach is Reach.CONNECTED, "it is connected")
        answers: queue.SimpleQueue[Found | Unanswered] = queue.SimpleQueue()
        step = QUEUED_MESSAGES // 2
        for under_way in range(step, MOST_FINDS + 1, step):
            for _ in range(step):
                a.client.find(SPACE, prompt(1)[0], 1, time.monotonic() + 10 * PATIENCE, answers.put)
            mute.hear()
            until(lambda count=under_way: a.client.status().finds == count, "all are under way")  # type: ignore[misc]
        for _ in range(step):
            a.client.find(SPACE, prompt(1)[0], 1, time.monotonic() + 10 * PATIENCE, answers.put)
            assert answers.get(timeout=PATIENCE) is Unanswered.BUSY
    ended = Counter(answers.get(timeout=0) for _ in range(MOST_FINDS))
    assert ended == {Unanswered.CLOSED: MOST_FINDS}
    assert answers.empty()


def test_more_frames_than_the_connection_takes_are_refused_and_none_is_lost() -> None:
    with MuteDirectory() as mute, Instance("a", mute.endpoint, silent_seconds=PATIENCE) as a:
        until(lambda: a.client.status().reach is Reach.CONNECTED, "it is connected")
        answers: queue.SimpleQueue[Found | Unanswered] = queue.SimpleQueue()
        long = bytes(4096 * 32)
        for _ in range(400):
            a.client.find(SPACE, long, 1, time.monotonic() + 0.5, answers.put)
        ended = Counter(answers.get(timeout=PATIENCE) for _ in range(400))
        assert ended[Unanswered.BUSY] > 0
        assert set(ended) <= {Unanswered.BUSY, Unanswered.DEADLINE}
        assert answers.empty()


def test_a_hello_that_was_lost_with_its_connection_is_said_on_the_next() -> None:
    patient = PublisherOptions(hello_seconds=10 * PATIENCE, resend_seconds=10 * PATIENCE)
    with contextlib.ExitStack() as stack:
        with MuteDirectory() as mute:
            a = stack.enter_context(Instance("a", mute.endpoint, options=patient))
            until(lambda: a.client.status().reach is Reach.CONNECTED, "it is connected")
            mute.hear()
        stack.enter_context(serving(listen=mute.endpoint))
        a.settle()


def test_an_instance_comes_back_from_a_directory_that_turned_it_away_for_good() -> None:
    with contextlib.ExitStack() as stack:
        with serving(SECRET) as endpoint:
            a = stack.enter_context(Instance("a", endpoint, silent_seconds=0.5))
            a.store(prompt(1))
            until(lambda: a.client.status().reach is Reach.TURNED_AWAY, "it is turned away")
        stack.enter_context(serving(listen=endpoint))
        b = stack.enter_context(Instance("b", endpoint))
        b.sees(prompt(1), {"a": 8})


def test_a_directory_that_is_gone_ends_finds_under_way() -> None:
    with MuteDirectory() as mute, Instance("a", mute.endpoint) as a:
        until(lambda: a.client.status().reach is Reach.CONNECTED, "it is connected")
        answers: queue.SimpleQueue[Found | Unanswered] = queue.SimpleQueue()
        a.client.find(SPACE, b"".join(prompt(1)), 1, time.monotonic() + PATIENCE, answers.put)
        until(lambda: a.client.status().finds == 1, "it is under way")
        mute.close()
        assert answers.get(timeout=PATIENCE) is Unanswered.GONE


def test_what_the_directory_says_wrong_is_counted_and_hurts_nobody() -> None:
    with MuteDirectory() as mute, Instance("a", mute.endpoint) as a:
        until(lambda: a.client.status().reach is Reach.CONNECTED, "it is connected")
        for frames in ([b""], [b"\xc1"], [b"x", b"y"], [os.urandom(1000)]):
            mute.say(frames)
        until(lambda: a.client.status().unreadable == 4, "all four were seen")
        assert a.client.status().reach is Reach.CONNECTED


def test_callbacks_that_raise_are_logged_and_the_next_is_called(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as endpoint, Instance("a", endpoint) as a:
        a.settle()

        def fail(_found: Found | Unanswered) -> None:
            raise ZeroDivisionError

        a.client.find(SPACE, b"".join(prompt(1)), 1, time.monotonic() + PATIENCE, fail)
        assert isinstance(a.find(prompt(1)), Found)
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]


def test_answers_come_on_one_thread_which_is_not_the_callers() -> None:
    with serving() as endpoint, Instance("a", endpoint) as a:
        a.settle()
        names: queue.SimpleQueue[str] = queue.SimpleQueue()
        for seconds in (PATIENCE, -1.0):
            a.client.find(
                SPACE,
                b"".join(prompt(1)),
                1,
                time.monotonic() + seconds,
                lambda _: names.put(threading.current_thread().name),
            )
        assert {names.get(timeout=PATIENCE) for _ in range(2)} == {"kvferry-directory"}


def test_what_cannot_be_asked_is_refused_where_it_is_asked() -> None:
    with serving() as endpoint, Instance("a", endpoint) as a:
        for namespace, digests, limit, told in (
            (b"short", b"", 1, "has 32 bytes"),
            (SPACE, b"half", 1, "has 32 bytes"),
            (SPACE, b"", 0, "the limit is 0"),
            (SPACE, b"", 9, "the limit is 9"),
        ):
            with pytest.raises(ValueError, match=told):
                a.client.find(namespace, digests, limit, time.monotonic() + PATIENCE, _never)
        a.settle()
        # Longer than one message: what does not fit is not asked for.
        long = [number.to_bytes(32, "big") for number in range(MAXIMUM_KEYS + 5)]
        with Instance("b", endpoint) as b:
            b.store(long[:3])
            a.sees(long, {"b": 3})


def test_a_close_that_cannot_be_is_told_and_can_be_tried_again() -> None:
    go_on = threading.Event()
    with serving() as endpoint, Instance("a", endpoint) as a:
        a.settle()

        def wait(_found: Found | Unanswered) -> None:
            go_on.wait(PATIENCE)

        a.client.find(SPACE, b"".join(prompt(1)), 1, time.monotonic() + PATIENCE, wait)
        with pytest.raises(KVFerryError) as told:
            a.client.close(time.monotonic() + 0.1)
        assert told.value.kind is ErrorKind.TIMEOUT
        go_on.set()


def test_the_section_of_a_configuration_leads_to_the_controller() -> None:
    variables = {"DIRECTORY_SECRET": SECRET.value.decode()}
    with serving(SECRET) as endpoint, Instance("b", endpoint, SECRET) as b:
        options = ControllerOptions(url=endpoint.url, secret_variable="DIRECTORY_SECRET")
        identity = Identity(instance="a", epoch=b"e" * 16, namespace=SPACE, ranks=1, address=b"")
        rows = Instance("a", endpoint, rows=prompt(1))
        make = functools.partial(controller_lookup, options, identity, rows)
        client = make(variables=variables, clock=time.monotonic, random=os.urandom)
        client.open()
        try:
            b.sees(prompt(1), {"a": 8})
        finally:
            client.close(time.monotonic() + PATIENCE)
        with pytest.raises(KVFerryError, match="holds no secret"):
            make(variables={}, clock=time.monotonic, random=os.urandom)


def _never(_found: Found | Unanswered) -> None:
    raise AssertionError("nothing was asked")
