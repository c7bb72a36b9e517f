"""One canonical, injective encoding of small declared values, for hashing.

Self-made on purpose: a few lines whose bytes no release of a library can change under us. Formats
such as JSON, MessagePack or CBOR let an encoder choose between several forms of one value; here
every value has exactly one form, and no form is the beginning of another.

=========  ================================================================
value      bytes (lengths and counts are 4 bytes, little-endian)
=========  ================================================================
``None``   ``n``
``int``    ``i``, length, decimal digits in ASCII, with ``-`` if negative
``str``    ``s``, length, UTF-8
``bytes``  ``b``, length, the bytes
sequence   ``t``, count, the encoded items
record     ``r``, count of fields, then name and value of each, in order
=========  ================================================================

A record is an attrs instance. Booleans and floats are refused: Python takes ``True`` for ``1`` and
``2.0`` for ``2``, and two declarations that compare equal must not have two encodings.
"""

from __future__ import annotations

import attrs


def encode(value: object) -> bytes:
    """The canonical form of ``value``. Raises ``TypeError`` for anything not in the table above.

    Lone surrogates, which JSON clients can put into a string, are encoded like any other code
    point, so that no text a user sends makes this fail. Pure; any thread.
    """
    if value is None:
        return b"n"
    if isinstance(value, int) and not isinstance(value, bool):
        return _sized(b"i", str(value).encode("ascii"))
    if isinstance(value, str):
        return _sized(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _sized(b"b", value)
    if isinstance(value, list | tuple):
        return b"t" + _count(len(value)) + b"".join(encode(item) for item in value)
    kind = type(value)
    if attrs.has(kind):
        # Every field takes part, so that one added later cannot be forgotten here.
        fields = attrs.fields(kind)
        pairs = (encode(f.name) + encode(getattr(value, f.name)) for f in fields)
        return b"r" + _count(len(fields)) + b"".join(pairs)
    raise TypeError(f"no canonical encoding for a {kind.__name__}: {value!r}")


def _sized(tag: bytes, raw: bytes) -> bytes:
    return tag + _count(len(raw)) + raw


def _count(number: int) -> bytes:
    return number.to_bytes(4, "little")
