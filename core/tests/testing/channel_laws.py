"""Puts the laws of channels to any channel, and tells which it breaks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping

import pytest

from kvferry.api import Channel, ChannelCapabilities, ChannelSpec
from kvferry.testing.conformance import ChannelConformance
from kvferry.testing.conformance.base import needed_by
from kvferry.testing.conformance.channel_subject import LEAST_REGISTERED, Workbench, claimed
from kvferry.testing.memory_channel import MemoryChannel, MemoryChannelOptions

MakeChannel = Callable[[], Channel]
CAPABILITIES = ChannelCapabilities(max_registered_bytes=LEAST_REGISTERED)
SLOW = {
    "test_a_cancelled_ticket_ends_and_tells_the_truth",
    "test_a_large_operation_is_whole",
    "test_a_peer_that_closes_ends_our_operations",
    "test_any_operations_act_like_slices_of_byte_arrays",
    "test_closing_a_connection_ends_its_operations",
    "test_closing_ends_every_ticket",
    "test_large_and_small_ones_may_be_mixed",
    "test_memory_files_are_as_good",
    "test_memory_is_left_alone_once_a_ticket_ended",
    "test_memory_that_the_peer_took_back_is_left_alone",
    "test_memory_that_we_took_back_is_left_alone",
    "test_several_threads_may_submit_at_once",
}
"""Put to a defect only where it is about them."""


class Laws(ChannelConformance):
    __test__ = False


def broken(
    make_channel: MakeChannel,
    laws: Collection[str] | None = None,
    also: Collection[str] = (),
    patience: float = 20.0,
    capabilities: ChannelCapabilities = CAPABILITIES,
) -> Mapping[str, str]:
    """Of ``laws``, by default the quick ones and ``also``, those that this channel breaks, and what they say.
    Laws about processes are left out."""
    found = {}
    spec = ChannelSpec(name="memory", factory="", options="", capabilities=capabilities)
    for name, law in Laws.laws().items():
        given = set(inspect.signature(law).parameters) - {"self"}
        if not given <= {"bench", "spec", "make_channel"} or not set(needed_by(law)) <= claimed(capabilities):
            continue
        if name not in laws if laws is not None else name in SLOW and name not in also:
            continue
        bench = Workbench(make_channel, capabilities, patience)
        values = {"bench": bench, "spec": spec, "make_channel": make_channel}
        try:
            law(Laws(), **{each: values[each] for each in given})
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - that is what is asked for
            found[name] = str(error)
        finally:
            for side in bench.sides:
                with contextlib.suppress(Exception):  # a defect has been told of already
                    side.close()
            bench.close_all()
    return found


def over(channel: type[MemoryChannel]) -> MakeChannel:
    options = MemoryChannelOptions(max_registered_bytes=LEAST_REGISTERED)
    return lambda: channel(options)
