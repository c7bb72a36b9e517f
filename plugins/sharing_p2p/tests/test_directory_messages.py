"""Frames between instances and the directory: every message survives, everything else is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import ErrorKind, KVFerryError
from kvferry_sharing_p2p.directory.answers import DirectoryOptions, SyncState
from kvferry_sharing_p2p.directory.desk import Desk
from kvferry_sharing_p2p.directory.messages import (
    MAXIMUM_ADDRESS_BYTES,
    MAXIMUM_FRAME_BYTES,
    MAXIMUM_KEYS,
    WIRE_VERSION,
    Accepted,
    Answer,
    AskStatus,
    Beat,
    BeginAll,
    Bye,
    Changes,
    Codec,
    EndAll,
    Find,
    Followed,
    FromDirectory,
    Hello,
    Refused,
    Rejected,
    SomeOfAll,
    Status,
    ToDirectory,
    Unknown,
)
from kvferry_sharing_p2p.directory.state import Directory

EPOCH, SESSION, SPACE, KEY = b"e" * 16, b"s" * 24, b"n" * 32, b"k" * 32
HELLO = Hello(
    version=WIRE_VERSION, attempt=1, instance="a", epoch=EPOCH, namespace=SPACE, ranks=2, address=b"here"
)
FIND = Find(version=WIRE_VERSION, id=9, asker="b", namespace=SPACE, digests=KEY * 2, limit=3)
QUESTIONS: list[ToDirectory] = [
    HELLO,
    FIND,
    Beat(session=SESSION, sequence=3),
    Bye(session=SESSION),
    BeginAll(session=SESSION, sequence=1),
    SomeOfAll(session=SESSION, sequence=2, digests=KEY),
    EndAll(session=SESSION, sequence=3),
    Changes(session=SESSION, sequence=4, added=KEY, removed=b"r" * 64),
    AskStatus(version=WIRE_VERSION),
]


@pytest.fixture
def codec() -> Codec:
    return Codec()


@pytest.fixture
def desk() -> Desk:
    return Desk(Directory(DirectoryOptions(), b"d" * 16, 0.0))


def asked(desk: Desk, message: ToDirectory, now: float = 0.0) -> FromDirectory:
    codec = Codec()
    answer = desk.answer(codec.encode(message), now)
    assert answer is not None
    return codec.read_from_directory(answer, "directory")


@pytest.mark.parametrize("message", QUESTIONS, ids=lambda message: type(message).__name__)
def test_every_message_to_the_directory_survives(codec: Codec, message: ToDirectory) -> None:
    assert codec.read_to_directory(codec.encode(message), "a peer") == message


def test_every_answer_arrives_as_what_it_was(desk: Desk) -> None:
    """A whole life over frames, in which each kind of answer is given."""
    accepted = asked(desk, HELLO)
    assert isinstance(accepted, Accepted)
    assert (accepted.epoch, accepted.attempt) == (EPOCH, 1)
    session = accepted.registration.session
    refused = asked(desk, msgspec.structs.replace(HELLO, epoch=b"f" * 16, attempt=5))
    assert isinstance(refused, Refused)
    assert (refused.epoch, refused.attempt) == (b"f" * 16, 5)
    for message in (
        BeginAll(session=session, sequence=1),
        SomeOfAll(session=session, sequence=2, digests=KEY),
        EndAll(session=session, sequence=3),
        Changes(session=session, sequence=4, added=b"2" * 32, removed=b""),
    ):
        assert isinstance(asked(desk, message), Followed)
    followed = asked(desk, Beat(session=session, sequence=4))
    assert isinstance(followed, Followed)
    assert (followed.progress.session, followed.progress.applied) == (session, 4)
    unknown = asked(desk, Beat(session=SESSION, sequence=1))
    assert isinstance(unknown, Unknown)
    assert unknown.stranger.session == SESSION
    answer = asked(desk, msgspec.structs.replace(FIND, digests=KEY + b"2" * 32 + b"3" * 32))
    assert isinstance(answer, Answer)
    assert answer.id == 9
    assert [(holder.instance, holder.chunks) for holder in answer.found.holders] == [("a", 2)]
    itself = asked(desk, msgspec.structs.replace(FIND, asker="a", digests=KEY))
    assert isinstance(itself, Answer)
    assert itself.found.holders == (), "nobody is sent to itself"
    status = asked(desk, AskStatus(version=WIRE_VERSION))
    assert isinstance(status, Status)
    assert status.status == desk.directory.status(0.0)
    assert status.status.instances[0].sync is SyncState.CURRENT
    assert desk.answer(Codec().encode(Bye(session=session)), 0.0) is None
    assert desk.directory.status(0.0).instances == ()


@given(frame=st.binary(max_size=300))
def test_garbage_is_a_typed_error_on_both_sides_and_the_desk_answers_it(frame: bytes) -> None:
    desk = Desk(Directory(DirectoryOptions(), b"d" * 16, 0.0))
    for read in (Codec().read_to_directory, Codec().read_from_directory):
        with pytest.raises(KVFerryError) as raised:
            read(frame, "10.0.0.7:9900")
        assert raised.value.kind in (ErrorKind.PROTOCOL, ErrorKind.COMPATIBILITY)
        assert raised.value.where == "10.0.0.7:9900"
    answer = desk.answer(frame, 0.0)
    assert answer is not None
    assert isinstance(Codec().read_from_directory(answer, "directory"), Rejected)
    assert desk.rejected == 1


@given(data=st.data(), message=st.sampled_from(QUESTIONS))
def test_a_damaged_frame_never_breaks_the_desk(data: st.DataObject, message: ToDirectory) -> None:
    desk = Desk(Directory(DirectoryOptions(), b"d" * 16, 0.0))
    frame = bytearray(Codec().encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    del frame[data.draw(st.integers(0, len(frame))) :]
    answer = desk.answer(bytes(frame), 0.0)
    if answer is not None:
        Codec().read_from_directory(answer, "directory")
    desk.directory.audit()


def test_another_version_is_told_apart_from_garbage(codec: Codec) -> None:
    for message in (HELLO, FIND, AskStatus(version=1)):
        other = msgspec.structs.replace(message, version=WIRE_VERSION + 1)
        with pytest.raises(KVFerryError, match=f"version {WIRE_VERSION + 1}") as raised:
            codec.read_to_directory(codec.encode(other), "a peer")
        assert raised.value.kind is ErrorKind.COMPATIBILITY
    later = msgspec.msgpack.encode({"type": "greeting", "version": 7, "what": [1, 2]})
    with pytest.raises(KVFerryError, match="version 7"):
        codec.read_to_directory(later, "a peer")


@pytest.mark.parametrize(
    "message",
    [
        msgspec.structs.replace(HELLO, epoch=b"short"),
        msgspec.structs.replace(HELLO, namespace=b"n" * 33),
        msgspec.structs.replace(HELLO, instance=""),
        msgspec.structs.replace(HELLO, instance="x" * 256),
        msgspec.structs.replace(HELLO, ranks=0),
        msgspec.structs.replace(HELLO, address=bytes(MAXIMUM_ADDRESS_BYTES + 1)),
        msgspec.structs.replace(FIND, limit=0),
        msgspec.structs.replace(FIND, limit=1000),
        Beat(session=SESSION, sequence=-1),
        Beat(session=b"", sequence=1),
    ],
    ids=range(10),
)
def test_what_is_out_of_bounds_is_no_message(codec: Codec, message: ToDirectory) -> None:
    with pytest.raises(KVFerryError) as raised:
        codec.read_to_directory(codec.encode(message), "a peer")
    assert raised.value.kind is ErrorKind.PROTOCOL


@pytest.mark.parametrize(
    ("tag", "fields"),
    [
        ("find", {"version": 1, "id": 1, "asker": "a", "namespace": SPACE, "digests": b"k" * 33}),
        ("some-of-all", {"session": SESSION, "sequence": 1, "digests": b"k" * 31}),
        ("changes", {"session": SESSION, "sequence": 1, "added": b"k" * 32, "removed": b"k"}),
        (
            "changes",
            {"session": SESSION, "sequence": 1, "added": KEY * MAXIMUM_KEYS, "removed": KEY},
        ),
        ("some-of-all", {"session": SESSION, "sequence": 1, "digests": KEY * (MAXIMUM_KEYS + 1)}),
    ],
    ids=["find", "part", "removed", "too many together", "too many"],
)
def test_digests_are_whole_and_not_too_many(codec: Codec, tag: str, fields: dict[str, object]) -> None:
    with pytest.raises(KVFerryError) as raised:
        codec.read_to_directory(msgspec.msgpack.encode({"type": tag, **fields}), "a peer")
    assert raised.value.kind is ErrorKind.PROTOCOL


def test_the_largest_messages_fit_into_a_frame_and_longer_frames_are_refused_unread(codec: Codec) -> None:
    largest: list[ToDirectory] = [
        Changes(session=SESSION, sequence=1, added=KEY * MAXIMUM_KEYS, removed=b""),
        msgspec.structs.replace(HELLO, address=bytes(MAXIMUM_ADDRESS_BYTES), instance="x" * 255),
    ]
    for message in largest:
        frame = codec.encode(message)
        assert len(frame) <= MAXIMUM_FRAME_BYTES
        assert codec.read_to_directory(frame, "a peer") == message
    fields = {"type": "beat", "session": SESSION, "sequence": 1, "more": b""}
    assert codec.read_to_directory(msgspec.msgpack.encode(fields), "a peer") == Beat(
        session=SESSION, sequence=1
    )
    too_long = msgspec.msgpack.encode({**fields, "more": bytes(MAXIMUM_FRAME_BYTES)})
    with pytest.raises(KVFerryError, match="no message") as raised:
        codec.read_to_directory(too_long, "a peer")
    assert raised.value.kind is ErrorKind.PROTOCOL
