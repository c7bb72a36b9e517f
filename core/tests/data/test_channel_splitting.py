"""Lists above ``max_ops`` become several calls, and stay one list for whoever asked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import (
    Connection,
    ErrorKind,
    ItemResult,
    KVFerryError,
    RemoteOp,
    Span,
    Ticket,
    TransferStatus,
)
from kvferry.data.splitting import SplitChannel, splitting
from kvferry.testing.channels import ForwardingChannel, NullChannel, NullConnection

DEADLINE = 50.0


@define(eq=False)
class Held(ForwardingChannel):
    """Keeps every call, for the test to end in its own order. Refuses those from ``refuse_from`` on."""

    inner: NullChannel = field(factory=NullChannel)
    calls: list[tuple[str, list[RemoteOp], float]] = field(factory=list)
    tickets: list[Ticket[TransferStatus]] = field(factory=list)
    refuse_from: int | None = None
    refusal: Exception = field(factory=lambda: KVFerryError("the channel is closed", kind=ErrorKind.CLOSED))

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        return self._keep("read", operations, deadline)

    def write(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        return self._keep("write", operations, deadline)

    def _keep(self, verb: str, operations: Sequence[RemoteOp], deadline: float) -> Ticket[TransferStatus]:
        if self.refuse_from is not None and len(self.calls) >= self.refuse_from:
            raise self.refusal
        self.calls.append((verb, list(operations), deadline))
        self.tickets.append(Ticket(len(operations)))
        return self.tickets[-1]

    def end(self, number: int) -> None:
        """Complete a call: operations at odd offsets fail, each with an error of its own."""
        self.tickets[number].complete([outcome(operation) for operation in self.calls[number][1]])


def outcome(operation: RemoteOp) -> ItemResult[TransferStatus]:
    if operation.offset % 2 == 0:
        return ItemResult(TransferStatus.DONE)
    return ItemResult(TransferStatus.FAILED, KVFerryError(str(operation.offset), kind=ErrorKind.IO))


def words(results: Sequence[ItemResult[TransferStatus]]) -> list[str]:
    return [result.status.name if result.error is None else result.error.what for result in results]


def operations(count: int) -> list[RemoteOp]:
    return [RemoteOp(Span("ours", number, 1), "theirs", number) for number in range(count)]


def submit(channel: SplitChannel, verb: str, wanted: list[RemoteOp]) -> Ticket[TransferStatus]:
    call = channel.read if verb == "read" else channel.write
    return call(NullConnection(), wanted, DEADLINE)


@given(
    count=st.integers(0, 40),
    max_ops=st.integers(1, 12),
    verb=st.sampled_from(["read", "write"]),
    data=st.data(),
)
def test_a_list_of_any_length_has_one_ticket_with_all_results_in_order(
    count: int, max_ops: int, verb: str, data: st.DataObject
) -> None:
    inner = Held()
    wanted = operations(count)
    ticket = submit(SplitChannel(inner, max_ops), verb, wanted)
    told: list[int] = []
    ticket.on_done(lambda _ticket: told.append(1))
    assert [operation for _, part, _ in inner.calls for operation in part] == wanted
    assert all(len(part) <= max_ops for _, part, _ in inner.calls)
    assert {(called, deadline) for called, _, deadline in inner.calls} == {(verb, DEADLINE)}
    order = data.draw(st.permutations(range(len(inner.calls))))
    for number in order:
        assert not ticket.done
        inner.end(number)
    assert ticket.done
    assert words(ticket.results) == words([outcome(operation) for operation in wanted])
    assert (ticket.completions, told) == (1, [1])


@pytest.mark.parametrize("verb", ["read", "write"])
def test_cancelling_reaches_every_call(verb: str) -> None:
    inner = Held()
    ticket = submit(SplitChannel(inner, 3), verb, operations(10))
    inner.end(1)
    assert not any(each.cancelled for each in inner.tickets)
    ticket.cancel()
    assert [each.cancelled for each in inner.tickets] == [True, False, True, True]
    assert not ticket.done, "the calls have not ended yet"
    for number in (0, 2, 3):
        inner.end(number)
    assert ticket.done


def test_what_the_first_call_is_refused_with_is_raised() -> None:
    inner = Held(refuse_from=0)
    with pytest.raises(KVFerryError) as caught:
        submit(SplitChannel(inner, 2), "read", operations(5))
    assert caught.value.kind is ErrorKind.CLOSED


def test_a_channel_that_is_closed_in_between_fails_the_rest() -> None:
    inner = Held(refuse_from=2)
    ticket = submit(SplitChannel(inner, 2), "write", operations(7))
    assert not ticket.done
    inner.end(0)
    inner.end(1)
    closed = ["the channel is closed"] * 3
    assert words(ticket.results) == words([outcome(each) for each in operations(4)]) + closed


def test_a_channel_that_breaks_in_between_leaves_no_call_without_a_ticket() -> None:
    inner = Held(refuse_from=1, refusal=OSError("broken"))
    ticket = submit(SplitChannel(inner, 2), "write", operations(4))
    inner.end(0)
    assert [result.error and result.error.kind for result in ticket.results[2:]] == [ErrorKind.INTERNAL] * 2


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_list_that_fits_is_handed_on_as_it_is(verb: str) -> None:
    inner = Held()
    for count in (0, 1, 4):
        assert submit(SplitChannel(inner, 4), verb, operations(count)) is inner.tickets[-1]
    assert len(inner.calls) == 3


@pytest.mark.parametrize("max_ops", [0, -1])
def test_a_call_takes_at_least_one_operation(max_ops: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        SplitChannel(Held(), max_ops)


def test_only_a_channel_with_a_limit_is_split() -> None:
    inner = Held()
    assert splitting(inner, None) is inner
    assert isinstance(splitting(inner, 3), SplitChannel)
