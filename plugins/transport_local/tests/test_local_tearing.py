"""Copies during which the ground shifts: none of them counts, and nobody's memory is touched afterwards."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.api import ErrorKind
from kvferry_transport_local.options import LocalOptions, Mechanism
from plugins.transport_local.tests.local_bench import (
    LENGTH,
    NAME,
    SECONDS,
    Ends,
    errors,
    fill,
    only_error,
    soon,
    submit,
    whole,
)
from plugins.transport_local.tests.local_gates import HeldMovement


@pytest.fixture(params=[Mechanism.MAPPED, Mechanism.CROSS_PROCESS], ids=lambda each: each.value)
def options(request: pytest.FixtureRequest) -> LocalOptions:
    return LocalOptions(mechanism=request.param, threads=1)


@pytest.fixture
def movement() -> Iterator[HeldMovement]:
    made = HeldMovement()
    yield made
    made.go.set()


def test_a_read_does_not_count_when_the_peer_took_the_memory_back_meanwhile(
    ends: Ends, options: LocalOptions, movement: HeldMovement
) -> None:
    near, far = ends.open(options=options, movement=movement), ends.open(options=options)
    connection = near.connect(far)
    # The bytes are there already, and the peer's notice may come whenever it likes.
    movement.behind = lambda _: far.channel.deregister(NAME)
    error = only_error(submit("read", near, connection, whole(1 << 20)))
    assert error.kind is ErrorKind.PROTOCOL
    assert "taken back" in error.what


def test_a_read_does_not_count_when_the_peer_was_closed_meanwhile(
    ends: Ends, options: LocalOptions, movement: HeldMovement
) -> None:
    near, far = ends.open(options=options, movement=movement), ends.open(options=options)
    connection = near.connect(far)
    movement.behind = lambda _: far.channel.close(soon())
    assert only_error(submit("read", near, connection, whole(1 << 20))).kind is ErrorKind.IO
    assert not connection.alive


def test_a_read_that_was_done_fails_when_its_batch_ends_after_the_memory_was_taken_back(
    ends: Ends, options: LocalOptions, movement: HeldMovement
) -> None:
    near, far = ends.open(options=options, movement=movement), ends.open(options=options)
    fill(far, 3)
    connection = near.connect(far)

    def behind(moved: int) -> None:
        if moved == 2:
            far.channel.deregister(NAME)

    movement.moved, movement.behind = 0, behind
    first, second = whole(3 << 20), whole(3 << 20, 3 << 20)
    ticket = submit("read", near, connection, first + second)
    assert only_error(ticket).kind is ErrorKind.PROTOCOL
    assert movement.moved == 2


def test_a_copy_that_is_late_does_not_count_and_the_ticket_waits_for_it(
    ends: Ends, options: LocalOptions, movement: HeldMovement
) -> None:
    near, far = ends.open(options=options, movement=movement), ends.open(options=options)
    connection = near.connect(far)
    movement.hold()
    ticket = submit("read", near, connection, whole(1 << 20), soon(0.1))
    assert movement.arrived.wait(SECONDS)
    assert not ticket.wait(0.3), "it ended while a thread is in its memory"
    movement.go.set()
    assert only_error(ticket).kind is ErrorKind.TIMEOUT


def test_after_cancel_no_other_piece_begins(
    ends: Ends, options: LocalOptions, movement: HeldMovement
) -> None:
    near, far = ends.open(options=options, movement=movement), ends.open(options=options)
    fill(far, 4)
    connection = near.connect(far)
    movement.moved = 0
    movement.hold()
    ticket = submit("read", near, connection, whole())
    assert movement.arrived.wait(SECONDS)
    ticket.cancel()
    movement.go.set()
    assert only_error(ticket).kind is ErrorKind.CANCELLED
    assert movement.moved == 1
    assert not near.bytes[4 << 20 :].any()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_taking_memory_back_waits_for_the_piece_that_is_written_into_it(
    ends: Ends, options: LocalOptions, movement: HeldMovement, verb: str
) -> None:
    """Of a read that is our own memory, of a write the peer's, which its own threads write."""
    near, far = ends.open(options=options, movement=movement), ends.open(options=options, movement=movement)
    fill(near, 5)
    fill(far, 6)
    connection = near.connect(far)
    movement.hold()
    ticket = submit(verb, near, connection, whole())
    assert movement.arrived.wait(SECONDS)
    owner = near if verb == "read" else far
    back = threading.Event()

    def take_back() -> None:
        owner.channel.deregister(NAME)
        back.set()

    taking = threading.Thread(target=take_back)
    taking.start()
    assert not back.wait(0.2), "a piece is under way, and the memory was given back"
    movement.go.set()
    assert back.wait(SECONDS)
    taking.join()
    at_return = owner.bytes.copy()
    assert only_error(ticket).kind is ErrorKind.PROTOCOL
    assert np.array_equal(owner.bytes, at_return)


def test_a_write_does_not_count_when_its_source_was_taken_back_meanwhile(
    ends: Ends, options: LocalOptions, movement: HeldMovement
) -> None:
    near, far = ends.open(options=options), ends.open(options=options, movement=movement)
    connection = near.connect(far)
    movement.behind = lambda _: near.channel.deregister(NAME)
    assert only_error(submit("write", near, connection, whole(1 << 20))).kind is ErrorKind.PROTOCOL


def test_the_owner_begins_no_piece_of_a_write_that_was_cancelled(
    ends: Ends, options: LocalOptions, movement: HeldMovement
) -> None:
    near, far = ends.open(options=options), ends.open(options=options, movement=movement)
    fill(near, 7)
    connection = near.connect(far)
    movement.hold()
    ticket = submit("write", near, connection, whole())
    assert movement.arrived.wait(SECONDS)
    ticket.cancel()
    assert only_error(ticket).kind is ErrorKind.CANCELLED
    # An answer to a later request shows that the peer has read what came before it.
    late = submit("write", near, connection, [whole(10)[0]], soon(0.2))
    assert late.wait(SECONDS)
    movement.go.set()
    assert errors(submit("write", near, connection, whole(1, LENGTH - 1))) == [None]
    assert not far.bytes[4 << 20 : -1].any()


def test_closing_a_connection_ends_what_is_under_way_on_it_alone(
    ends: Ends, options: LocalOptions, movement: HeldMovement
) -> None:
    near, far = ends.open(options=options, movement=movement), ends.open(options=options)
    first, second = near.connect(far), near.connect(far)
    movement.hold()
    ticket, kept = submit("read", near, first, whole()), submit("read", near, second, whole(1 << 20))
    assert movement.arrived.wait(SECONDS)
    first.close()
    movement.go.set()
    assert only_error(ticket).kind is ErrorKind.CLOSED
    assert errors(kept) == [None]


def test_a_channel_that_cannot_end_says_so_and_can_be_closed_again(
    ends: Ends, options: LocalOptions, movement: HeldMovement
) -> None:
    near, far = ends.open(options=options, movement=movement), ends.open(options=options)
    connection = near.connect(far)
    movement.hold()
    ticket = submit("read", near, connection, whole(1 << 20))
    assert movement.arrived.wait(SECONDS)
    with pytest.raises(Exception, match="did not end by the deadline"):
        near.channel.close(soon(0.1))
    assert not ticket.done
    movement.go.set()
    near.channel.close(soon())
    assert only_error(ticket).kind is ErrorKind.CLOSED


def test_memory_that_went_away_during_a_copy_was_taken_back_and_not_broken(
    ends: Ends, movement: HeldMovement
) -> None:
    """The system only sees that it is not mapped any more."""
    options = LocalOptions(mechanism=Mechanism.CROSS_PROCESS)
    near, far = ends.open(options=options, movement=movement), ends.open(options=options)
    connection = near.connect(far)
    movement.fails_with = errno.EFAULT
    assert only_error(submit("read", near, connection, whole(1 << 20))).kind is ErrorKind.IO
    movement.behind = lambda _: far.channel.deregister(NAME)
    assert only_error(submit("read", near, connection, whole(1 << 20))).kind is ErrorKind.PROTOCOL


def test_a_copy_that_ends_behind_the_deadline_does_not_count(
    ends: Ends, options: LocalOptions, movement: HeldMovement
) -> None:
    """Also when nobody has looked at the clock since."""
    now = [0.0]
    near = ends.open(options=options, movement=movement, facts={"clock": lambda: now[0]})
    far = ends.open(options=options)
    connection = near.channel.connect(far.channel.export(), 5.0)

    def behind(_moved: int) -> None:
        now[0] = 10.0

    movement.behind = behind
    assert only_error(submit("read", near, connection, whole(1 << 20), 10.0)).kind is ErrorKind.TIMEOUT
    now[0] = 0.0
    near.channel.close(5.0)
