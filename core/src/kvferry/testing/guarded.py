"""Host memory for spans, with bytes around each span that nobody may touch."""

from __future__ import annotations

import ctypes
import mmap
import threading

from attrs import define, field

from kvferry.api import Region, Span

_GUARD = 64
_FENCE = 0xA5
BLANK = 0x5A
"""What a span holds that was reserved."""
_BEYOND = 4096
"""How far behind the last fence is looked as well."""
MEMORY = "memory"
"""The region of a side."""


@define
class GuardedMemory:
    """One region, handed out span by span and never twice. Takes only the memory that is used.

    Spans begin at odd offsets as well as at even ones, and fences lie between them. What is not lent
    is remembered, so that :meth:`trespasses` can tell when a byte of it changed. Any thread.

    ``region`` is memory of this name and length that somebody else owns; without it the memory is new. Where
    bytes move between two memories, each needs a ``fence`` of its own, or one that is copied onto the
    other's would not show.
    """

    name: str
    length: int
    region: Region = field()
    fence: int = _FENCE
    """The byte that lies between the spans."""
    _edge: int = 0
    """Where the last fence ends."""
    _lent: dict[Span, bool] = field(factory=dict)
    _expected: dict[Span, bytes] = field(factory=dict)
    _lock: threading.Lock = field(factory=threading.Lock)

    @region.default
    def _new_memory(self) -> Region:
        memory = mmap.mmap(-1, self.length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        window = (ctypes.c_ubyte * self.length).from_buffer(memory)
        return Region(name=self.name, address=ctypes.addressof(window), length=self.length, keep_alive=window)

    def take(self, data: bytes) -> Span:
        """A span that holds ``data`` and is lent from now on."""
        span = self.reserve(len(data))
        ctypes.memmove(self.region.address + span.offset, data, len(data))
        return span

    def reserve(self, length: int) -> Span:
        """A span of blank bytes that is lent from now on."""
        with self._lock:
            edge = self._edge
            offset = edge + _GUARD + len(self._lent) % 3
            end = offset + length
            assert end + _GUARD <= self.length, "the kit's memory is too small for this law"
            span = Span(self.name, offset, length)
            ctypes.memset(self.region.address + edge, self.fence, end + _GUARD - edge)
            ctypes.memset(self.region.address + offset, BLANK, length)
            self._edge = end + _GUARD
            self._lent[span] = True
            return span

    def bytes_of(self, span: Span) -> bytes:
        return ctypes.string_at(self.region.address + span.offset, span.length)

    def settle(self, span: Span, scribble: bool = False) -> None:
        """The span is not lent any more: from now on its bytes must stay. With ``scribble``, other
        bytes are put there first, as a caller would who uses the memory again."""
        if scribble:
            flipped = bytes(byte ^ 0xFF for byte in self.bytes_of(span))
            ctypes.memmove(self.region.address + span.offset, flipped, span.length)
        self._lent[span] = False
        self._expected[span] = self.bytes_of(span)

    def trespasses(self) -> list[str]:
        """What was changed and was not lent, in words."""
        found = []
        edge = self._edge
        whole = ctypes.string_at(self.region.address, min(self.length, edge + _BEYOND))
        at = 0
        for span in [*self._lent, Span(self.name, edge, 0)]:
            gap = whole[at : span.offset]
            if gap != bytes([self.fence]) * len(gap):
                wrong = at + next(number for number, byte in enumerate(gap) if byte != self.fence)
                found.append(f"byte {wrong} lies outside every span and was changed")
            at = span.offset + span.length
        if any(whole[edge:]):
            found.append(f"something behind byte {edge} was changed, where no span ever was")
        for span, expected in self._expected.items():
            if whole[span.offset : span.offset + span.length] != expected:
                found.append(f"{span} was changed after its ticket had ended")
        return found


def side_memory(length: int, number: int, region: Region | None = None) -> GuardedMemory:
    """The memory of one of several sides between which bytes move. All bear the same name, and those of other
    numbers begin elsewhere and have other fences: whoever takes one side for the other, an offset of one for
    that of the other, or copies too much, is noticed."""
    fence = _FENCE ^ number % 16
    memory = (
        GuardedMemory(MEMORY, length, fence=fence)
        if region is None
        else GuardedMemory(MEMORY, length, region, fence)
    )
    memory.settle(memory.reserve(1000 + 77 * (number % 16)))
    return memory
