"""The wire protocol's decoders: inverse of the encoders, and safe with whatever comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import ErrorKind, KVFerryError
from kvferry_transport_tcp.address import Address, parse_address
from kvferry_transport_tcp.export import Export
from kvferry_transport_tcp.wire import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_DATA_BYTES,
    MAX_NAME_BYTES,
    MAX_PIECES,
    Header,
    Hello,
    Kind,
    PieceStatus,
    RemotePiece,
    Role,
    WireError,
    decode_header,
    decode_pieces,
    decode_statuses,
    encode_pieces,
)

U64 = st.integers(0, (1 << 64) - 1)
NAMES = st.text(max_size=40).filter(lambda name: len(name.encode(errors="replace")) <= MAX_NAME_BYTES)
TEXTS = NAMES.filter(lambda name: not any(0xD800 <= ord(c) < 0xE000 for c in name))
PIECES = st.lists(
    st.builds(RemotePiece, TEXTS, U64, st.integers(0, MAX_DATA_BYTES // MAX_PIECES)),
    min_size=1,
    max_size=30,
)
HELLOS = st.builds(
    Hello,
    role=st.sampled_from(Role),
    secret=st.booleans(),
    nonce=st.binary(min_size=32, max_size=32),
    connection=st.binary(min_size=16, max_size=16),
    wanted_epoch=st.binary(min_size=16, max_size=16),
    epoch=st.binary(min_size=16, max_size=16),
    rank=st.integers(0, (1 << 32) - 1),
    instance=TEXTS,
)
EXPORTS = st.builds(
    Export,
    version=st.integers(0, 65535),
    address=st.builds(
        Address, TEXTS.filter(lambda text: bool(text) and text.isprintable()), st.integers(1, 65535)
    ),
    instance=TEXTS,
    rank=st.integers(0, (1 << 32) - 1),
    epoch=st.binary(min_size=16, max_size=16),
)


def request(pieces: list[RemotePiece], kind: Kind = Kind.READ) -> tuple[Header, bytes]:
    body = encode_pieces(pieces)
    return Header(kind, len(pieces), len(body), sum(piece.length for piece in pieces), 7, 9), body


@given(PIECES, st.sampled_from([Kind.READ, Kind.WRITE]))
def test_requests_come_out_as_they_went_in(pieces: list[RemotePiece], kind: Kind) -> None:
    header, body = request(pieces, kind)
    assert decode_header(header.to_bytes()) == header
    assert decode_pieces(header, body) == pieces


@given(HELLOS)
def test_hellos_come_out_as_they_went_in(hello: Hello) -> None:
    assert Hello.parse(hello.to_bytes()) == hello


@given(EXPORTS)
def test_exports_come_out_as_they_went_in(export: Export) -> None:
    assert Export.parse(export.to_bytes()) == export


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.booleans())
def test_whatever_comes_as_a_header_is_refused_or_bounded(data: bytes, ours: bool) -> None:
    if ours:
        data = b"KVFT" + data[4:]
    try:
        header = decode_header(data)
    except WireError:
        return
    assert header.body <= MAX_BODY_BYTES
    assert header.data <= MAX_DATA_BYTES


@given(st.binary(max_size=300), st.integers(1, 4), st.integers(0, 1 << 20))
def test_whatever_comes_as_pieces_is_refused_or_adds_up(body: bytes, pieces: int, data: int) -> None:
    header = Header(Kind.READ, pieces, len(body), data)
    try:
        found = decode_pieces(header, body)
    except WireError:
        return
    assert len(found) == pieces
    assert sum(piece.length for piece in found) == data


@given(PIECES, st.data())
def test_pieces_that_are_cut_or_longer_are_refused(pieces: list[RemotePiece], data: st.DataObject) -> None:
    header, body = request(pieces)
    cut = data.draw(st.integers(0, len(body) - 1))
    for wrong in (body[:cut], body + bytes(16), body + b"\0"):
        with pytest.raises(WireError):
            decode_pieces(header, wrong)


@given(HELLOS, st.data())
def test_hellos_that_are_cut_are_refused(hello: Hello, data: st.DataObject) -> None:
    whole = hello.to_bytes()
    with pytest.raises(WireError):
        Hello.parse(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(EXPORTS, st.data())
def test_exports_that_are_cut_or_longer_are_refused(export: Export, data: st.DataObject) -> None:
    whole = export.to_bytes()
    for wrong in (whole[: data.draw(st.integers(0, len(whole) - 1))], whole + b"\0"):
        with pytest.raises(KVFerryError) as caught:
            Export.parse(wrong)
        assert caught.value.kind is ErrorKind.PROTOCOL


@given(st.binary(max_size=200))
def test_whatever_comes_as_an_export_is_refused_with_one_kind(data: bytes) -> None:
    with pytest.raises(KVFerryError) as caught:
        Export.parse(data)
    assert caught.value.kind is ErrorKind.PROTOCOL


@given(st.integers(1, 50), st.binary(max_size=60))
def test_results_are_one_for_each_piece_or_refused(pieces: int, body: bytes) -> None:
    try:
        statuses = decode_statuses(pieces, body)
    except WireError:
        return
    assert len(statuses) == pieces
    assert body or set(statuses) == {PieceStatus.DONE}


@pytest.mark.parametrize(
    "header",
    [
        Header(Kind.READ, 1, MAX_BODY_BYTES + 1, 0),
        Header(Kind.WRITE, 1, 18, MAX_DATA_BYTES + 1),
        Header(Kind.READ, 1, 18, MAX_DATA_BYTES + 1),
        Header(Kind.READ, MAX_PIECES + 1, 18, 0),
        Header(Kind.READ, 0, 2, 0),
        Header(Kind.HELLO, 0, 1 << 31, 0),
        Header(Kind.RECEIPT, 0, 1, 0),
        Header(Kind.TIME, 0, 0, 1),
    ],
    ids=str,
)
def test_lengths_beyond_their_limits_are_refused(header: Header) -> None:
    with pytest.raises(WireError):
        decode_header(header.to_bytes())


@given(
    st.sampled_from(["10.0.0.1", "::1", "fe80::1%eth0", "host.example", "localhost"]), st.integers(0, 65535)
)
def test_addresses_come_out_as_they_went_in(host: str, port: int) -> None:
    assert parse_address(str(Address(host, port))) == Address(host, port)


@given(st.text(max_size=30))
def test_whatever_is_written_as_an_address_is_read_or_refused(text: str) -> None:
    try:
        address = parse_address(text)
    except ValueError:
        return
    assert address.host
    assert 0 <= address.port <= 65535


@pytest.mark.parametrize(
    ("text", "loopback", "wildcard"),
    [
        ("127.0.0.1:1", True, False),
        ("127.9.9.9:1", True, False),
        ("[::1]:1", True, False),
        ("localhost:1", True, False),
        ("0.0.0.0:1", False, True),
        ("[::]:1", False, True),
        ("10.0.0.1:1", False, False),
        ("elsewhere:1", False, False),
    ],
)
def test_it_is_known_who_reaches_an_address(text: str, loopback: bool, wildcard: bool) -> None:
    address = parse_address(text)
    assert (address.loopback, address.wildcard) == (loopback, wildcard)
