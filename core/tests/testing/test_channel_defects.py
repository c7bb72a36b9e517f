"""The laws of channels can be broken: each mistake breaks those that are meant for it, and no others."""

from __future__ import annotations

import threading

import pytest

from kvferry.api import ChannelContext
from kvferry.testing.conformance.channel_subject import LEAST_REGISTERED
from kvferry.testing.faults import DoubleCompletion, Fault, FaultPlan, LateWrite, LoseCompletion
from kvferry.testing.faulty_channel import FaultyChannel
from kvferry.testing.memory_channel import MemoryChannel, make_memory_channels

from . import defective_channels as defects
from .channel_laws import MakeChannel, broken, over


def faulty(*faults: Fault) -> MakeChannel:
    make = make_memory_channels(max_registered_bytes=LEAST_REGISTERED)
    return lambda: FaultyChannel(make(), FaultPlan(faults))


BOUNDS = "test_memory_beyond_the_peer_s_region_is_refused"
OUR_BOUNDS = "test_memory_beyond_our_region_is_refused"
ONE_WRONG = "test_one_wrong_operation_leaves_the_others_alone"
READING, WRITING = "test_reading_brings_the_peer_s_bytes", "test_writing_brings_our_bytes"
CANCELLED = "test_a_cancelled_ticket_ends_and_tells_the_truth"
CLOSING = "test_closing_ends_every_ticket"
TAKEN_BACK = "test_what_the_peer_took_back_cannot_be_named"
AGAIN = "test_a_name_may_be_registered_again_with_other_memory"
LIMIT = "test_the_claimed_limit_is_the_limit"
ONCE = "test_every_ticket_ends_exactly_once"
LEFT_ALONE = "test_memory_is_left_alone_once_a_ticket_ended"


@pytest.mark.parametrize(
    ("channel", "expected"),
    [
        (defects.IgnoresTheirBounds, {BOUNDS, ONE_WRONG}),
        (defects.IgnoresOurBounds, {OUR_BOUNDS}),
        (defects.FailsTheWholeCall, {ONE_WRONG}),
        (defects.SortsResults, {ONE_WRONG}),
        (defects.IgnoresTheEpoch, {"test_a_restarted_peer_is_another"}),
        (defects.IgnoresCancelling, {"test_cancelling_ends_what_has_not_begun"}),
        (defects.IgnoresDeadlines, {"test_a_deadline_that_passed_is_told"}),
        (defects.WritesAfterCancelling, {CANCELLED}),
        (defects.LeavesTicketsOpen, {CLOSING}),
        (defects.RemembersRegions, {TAKEN_BACK, AGAIN}),
        (
            defects.KeepsWhatWasTakenBack,
            {
                TAKEN_BACK,
                AGAIN,
                LIMIT,
                "test_what_we_took_back_cannot_be_named",
                "test_memory_that_we_took_back_is_left_alone",
                "test_memory_that_the_peer_took_back_is_left_alone",
                "test_registering_and_taking_back_balance",
            },
        ),
        (defects.ReplacesRegions, {"test_a_name_is_registered_once"}),
        (defects.RegistersWithoutLimit, {LIMIT}),
        (
            defects.ShowsNoRegions,
            {
                "test_a_connection_shows_what_the_peer_registered",
                "test_any_name_will_do",
                TAKEN_BACK,
                LIMIT,
            },
        ),
        (defects.TakesAnyConnection, {"test_a_connection_of_another_channel_is_refused"}),
        (defects.ConnectsToAnything, {"test_what_nobody_exported_is_refused"}),
    ],
)
def test_a_mistake_breaks_the_laws_that_are_about_it_alone(
    channel: type[MemoryChannel], expected: set[str]
) -> None:
    assert set(broken(over(channel), also=expected)) == expected


@pytest.mark.parametrize(
    "channel",
    [
        defects.MissesOddOffsets,
        defects.MixesUpOffsets,
        defects.ReadsItself,
        defects.SaysDoneBefore,
        defects.WritesWholeWords,
    ],
)
def test_wrong_bytes_are_noticed_in_both_directions(channel: type[MemoryChannel]) -> None:
    laws = {READING, WRITING, "test_a_call_without_operations_ends", BOUNDS}
    assert set(broken(over(channel), laws)) == {READING, WRITING}


def test_a_late_write_is_noticed() -> None:
    laws = {READING, WRITING, LEFT_ALONE, OUR_BOUNDS}
    found = broken(faulty(Fault("read", LateWrite())), laws)
    assert set(found) == {READING, LEFT_ALONE}
    assert "was changed after its ticket had ended" in found[LEFT_ALONE]


def test_a_lost_completion_is_noticed() -> None:
    laws = {ONCE, "test_a_call_without_operations_ends", WRITING}
    found = broken(faulty(Fault("read", LoseCompletion(), nth=10)), laws, patience=2.0)
    assert set(found) == {ONCE}
    assert "never ended" in found[ONCE]


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_doubled_completion_is_noticed(verb: str) -> None:
    laws = {ONCE, "test_a_region_that_is_not_there_can_be_deregistered"}
    found = broken(faulty(Fault(verb, DoubleCompletion(), nth=7)), laws)
    assert set(found) == {ONCE}
    assert "was completed 2 times" in found[ONCE]


def test_a_thread_that_is_left_is_noticed() -> None:
    giving_back = "test_closing_gives_everything_back"
    enough = threading.Event()

    class LeavesAThread(MemoryChannel):
        def open(self, context: ChannelContext) -> None:
            super().open(context)
            threading.Thread(target=enough.wait, name="kvferry-left").start()

    try:
        found = broken(over(LeavesAThread), {giving_back, ONCE})
    finally:
        enough.set()
    assert set(found) == {giving_back}
    assert "kvferry-left" in found[giving_back]
