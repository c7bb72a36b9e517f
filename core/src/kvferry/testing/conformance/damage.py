"""What can happen to the bytes of a record, and how to say it."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen


@frozen
class Damage:
    """``name`` follows the word "after" in messages; ``change`` gives the damaged bytes of a record."""

    name: str
    change: Callable[[bytes], bytes]


def _flip(at: int) -> Damage:
    where = f"byte {at}" if at >= 0 else "the last byte" if at == -1 else f"byte {-at} from the end"
    return Damage(
        f"one bit of {where} was flipped",
        lambda data: data[: at % len(data)] + bytes([data[at] ^ 4]) + data[at:][1:],
    )


FLIPPED_BITS = tuple(_flip(at) for at in (0, 1, 9, 17, 40, 100, 150, -1, -2, -100, -900, -1700))
"""In every part of a record of 1,800 bytes and a header."""

OTHER_LENGTHS = (
    Damage("all of it was cut off", lambda _: b""),
    Damage("all but the first byte was cut off", lambda data: data[:1]),
    Damage("its second half was cut off", lambda data: data[: len(data) // 2]),
    Damage("its last byte was cut off", lambda data: data[:-1]),
    Damage("a byte was put behind it", lambda data: data + b"\x00"),
    Damage("it was put behind itself once more", lambda data: data + data),
    Damage("all of it was overwritten with zeros", lambda data: bytes(len(data))),
)
