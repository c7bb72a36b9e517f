"""A channel for a process of its own, in which nobody else can be reached."""

from __future__ import annotations

from kvferry.api import Channel, ChannelContext
from kvferry.testing.memory_channel import MemoryChannel, MemoryChannelOptions


class Talkative(MemoryChannel):
    def open(self, context: ChannelContext) -> None:
        print("this is no answer", flush=True)  # noqa: T201 - as a plugin may do
        super().open(context)


def make() -> Channel:
    return Talkative(MemoryChannelOptions())
