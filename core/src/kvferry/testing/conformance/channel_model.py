"""The law that a model stands for: any operations do to memory what slices of byte arrays do."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from attrs import define, field, frozen
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvferry.api import ErrorKind, ItemResult, Region, RemoteOp, Span, TransferStatus
from kvferry.testing.conformance.channel_driver import expect_failed, pattern, told
from kvferry.testing.conformance.channel_subject import ChannelSubject, Workbench

_BYTES = 6000
_GUARD = 128
_NAME = "model"
_EXAMPLES = 60


@frozen
class _Drawn:
    """One operation; offsets may lie outside, and names may mean nothing."""

    local: int
    remote: int
    length: int
    local_name: str = _NAME
    remote_name: str = _NAME

    @property
    def good(self) -> bool:
        return (
            self.local_name == self.remote_name == _NAME
            and min(self.local, self.remote) >= 0
            and max(self.local, self.remote) + self.length <= _BYTES
        )


_OFFSETS = st.one_of(
    st.integers(0, _BYTES),
    st.sampled_from([0, 1, 63, 64, 4095, 4096, 4097, _BYTES - 1, _BYTES, _BYTES + 1, -1, 1 << 64]),
)
_LENGTHS = st.one_of(st.integers(0, 200), st.integers(0, _BYTES + 1))
_NAMES = st.sampled_from([_NAME] * 12 + ["", "modell"])
_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["read", "write"]),
        st.integers(0, 1),
        st.lists(st.builds(_Drawn, _OFFSETS, _OFFSETS, _LENGTHS, _NAMES, _NAMES), max_size=12),
    ),
    min_size=1,
    max_size=6,
)


@define(eq=False)
class _Watched:
    """A region with bytes around it that belong to nobody, and what it should hold."""

    memory: mmap.mmap = field(factory=lambda: mmap.mmap(-1, _GUARD + _BYTES + _GUARD))
    expected: bytearray = field(factory=bytearray)
    region: Region = field(init=False)

    def __attrs_post_init__(self) -> None:
        window = (ctypes.c_ubyte * len(self.memory)).from_buffer(self.memory)
        address = ctypes.addressof(window) + _GUARD
        self.region = Region(name=_NAME, address=address, length=_BYTES, keep_alive=window)

    def fill(self, data: bytes) -> None:
        self.expected[:] = data
        self.memory[_GUARD : _GUARD + _BYTES] = data

    def check(self, what: str) -> None:
        found = self.memory[:]
        assert found[:_GUARD] == found[-_GUARD:] == bytes(_GUARD), f"bytes outside of {what} were written"
        found = found[_GUARD:-_GUARD]
        if found != self.expected:
            at = next(number for number in range(_BYTES) if found[number] != self.expected[number])
            raise AssertionError(f"byte {at} of {what} is {found[at]}, and should be {self.expected[at]}")


class ModelLaws(ChannelSubject, kit=True):
    """Random operations against byte arrays."""

    def test_any_operations_act_like_slices_of_byte_arrays(self, bench: Workbench) -> None:
        """Calls of any operations, right and wrong ones, from either side, leave in both memories what the
        same assignments leave in byte arrays."""
        sides = [bench.open_bare(), bench.open_bare()]
        memories = [_Watched(), _Watched()]
        for side, memory in zip(sides, memories, strict=True):
            side.channel.register(memory.region)
        ways = [bench.way(*sides), bench.way(*reversed(sides))]

        # Finding shorter failing lists would take long over a slow channel, and they are short already.
        @settings(
            max_examples=_EXAMPLES,
            phases=(Phase.generate,),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(calls=_CALLS)
        def act_alike(calls: Sequence[tuple[str, int, list[_Drawn]]]) -> None:
            for number, memory in enumerate(memories):
                memory.fill(pattern(_BYTES, number))
            for verb, near, drawn in calls:
                if verb not in bench.verbs:
                    continue
                wanted = _apart(verb, drawn)[: bench.limit]
                operations = [
                    RemoteOp(Span(each.local_name, each.local, each.length), each.remote_name, each.remote)
                    for each in wanted
                ]
                way = ways[near]
                results = way.wait(way.near.submit(verb, way.connection, operations))
                _judge(verb, wanted, results, memories[near].expected, memories[1 - near].expected)
                memories[near].check(f"our memory after a {verb}")
                memories[1 - near].check(f"the peer's memory after a {verb}")

        act_alike()
        bench.end()


def _apart(verb: str, drawn: Sequence[_Drawn]) -> list[_Drawn]:
    """Those whose destinations do not overlap: no order is promised between operations."""
    taken = bytearray(_BYTES + 1)
    kept = []
    for each in drawn:
        begin = each.local if verb == "read" else each.remote
        span = slice(begin, begin + each.length)
        if each.good:
            if any(taken[span]):
                continue
            taken[span] = b"\x01" * each.length
        kept.append(each)
    return kept


def _judge(
    verb: str,
    wanted: Sequence[_Drawn],
    results: Sequence[ItemResult[TransferStatus]],
    near: bytearray,
    far: bytearray,
) -> None:
    """Look at each result, and do to the model what is done."""
    source, target = (bytes(far), near) if verb == "read" else (bytes(near), far)
    for each, result in zip(wanted, results, strict=True):
        if not each.good:
            expect_failed(result, ErrorKind.PROTOCOL)
            continue
        assert result.status is TransferStatus.DONE, f"{verb} {each}: {told([result])}"
        begin, end = (each.remote, each.local) if verb == "read" else (each.local, each.remote)
        target[end : end + each.length] = source[begin : begin + each.length]
