"""How memory is reached: mapped where that is safe, across processes elsewhere, or not at all and said so."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from kvferry.api import ErrorKind, KVFerryError, Region, RemoteOp, Span
from kvferry.data.mapping import create_region, region_view
from kvferry_transport_local.options import LocalOptions, Mechanism
from plugins.transport_local.tests.local_bench import (
    LENGTH,
    NAME,
    Ends,
    errors,
    fill,
    only_error,
    submit,
    whole,
)

REASON = "the system answers EPERM"


def refuse(_pid: int, _address: int, _token: bytes) -> str:
    return REASON


@pytest.mark.parametrize("verb", ["read", "write"])
def test_memory_without_a_file_fails_with_a_remedy_where_reads_are_refused(ends: Ends, verb: str) -> None:
    near = ends.open(memory_file=False, prober=refuse)
    far = ends.open(memory_file=False, prober=refuse)
    fill(near, 1)
    before = far.bytes.copy()
    error = only_error(submit(verb, near, near.connect(far), whole()))
    assert error.kind is ErrorKind.UNSUPPORTED
    assert REASON in str(error)
    assert verb == "write" or "tcp" in error.remedy
    assert np.array_equal(far.bytes, before)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_memory_files_need_no_reads_across_processes(ends: Ends, verb: str) -> None:
    near, far = ends.open(prober=refuse), ends.open(prober=refuse)
    fill(near, 1)
    fill(far, 2)
    assert errors(submit(verb, near, near.connect(far), whole())) == [None]
    assert np.array_equal(near.bytes, far.bytes)


def test_only_the_side_that_is_copied_from_has_to_be_readable(ends: Ends) -> None:
    near, far = ends.open(prober=refuse), ends.open(memory_file=False, prober=refuse)
    fill(near, 1)
    connection = near.connect(far)
    assert errors(submit("write", near, connection, whole())) == [None]
    assert np.array_equal(near.bytes, far.bytes)
    assert only_error(submit("read", near, connection, whole())).kind is ErrorKind.UNSUPPORTED


def test_mapped_alone_refuses_memory_without_a_file(ends: Ends) -> None:
    near, far = ends.open(options=LocalOptions(mechanism=Mechanism.MAPPED)), ends.open(memory_file=False)
    error = only_error(submit("read", near, near.connect(far), whole()))
    assert error.kind is ErrorKind.UNSUPPORTED
    assert "mechanism" in error.why


def test_the_log_says_once_why_memory_is_not_mapped(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    near, far = ends.open(), ends.open(memory_file=False)
    other = np.zeros(4096, np.uint8)
    far.channel.register(Region(name="other", address=other.ctypes.data, length=4096, keep_alive=other))
    with caplog.at_level("INFO", "kvferry_transport_local"):
        near.connect(far)
    told = [record.getMessage() for record in caplog.records if "not mapped" in record.getMessage()]
    # The peer maps our memory file, so only one side has something to say.
    assert len(told) == 1
    assert "no memory file" in told[0]


def test_a_file_that_could_shrink_is_not_mapped_and_still_read(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = ends.open(), ends.open()
    fd = os.memfd_create("loose", os.MFD_CLOEXEC)
    os.ftruncate(fd, 1 << 16)
    with mmap.mmap(fd, 1 << 16) as loose:
        loose[:5] = b"bytes"
        view = np.frombuffer(loose, np.uint8)
        far.channel.register(Region(name="loose", address=view.ctypes.data, length=1 << 16, fd=fd))
        with caplog.at_level("INFO", "kvferry_transport_local"):
            connection = near.connect(far)
            operation = RemoteOp(Span(NAME, 0, 5), "loose", 0)
            assert errors(submit("read", near, connection, [operation])) == [None]
        assert near.bytes[:5].tobytes() == b"bytes"
        assert "could shrink" in caplog.text
        far.channel.deregister("loose")
        del view
    os.close(fd)


def test_a_part_of_a_memory_file_is_found_at_its_place(ends: Ends) -> None:
    near, far = ends.open(prober=refuse), ends.open(prober=refuse)
    with create_region("arena", 1 << 16) as arena:
        region_view(arena.region)[:] = np.arange(1 << 16, dtype=np.uint32).astype(np.uint8)
        part = Region(name="part", address=arena.region.address + 4100, length=9000, fd=arena.region.fd)
        far.channel.register(part)
        operation = RemoteOp(Span(NAME, 1, 100), "part", 7)
        assert errors(submit("read", near, near.connect(far), [operation])) == [None]
        assert near.bytes[1:101].tolist() == [(4107 + number) % 256 for number in range(100)]
        far.channel.deregister("part")


def test_a_private_copy_of_a_memory_file_is_not_taken_for_the_file(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    with create_region("arena", 8192) as arena:
        region_view(arena.region)[:] = 1
        with mmap.mmap(arena.region.fd, 8192, mmap.MAP_PRIVATE) as private:
            private[:8192] = bytes([2]) * 8192  # the file has other bytes now
            view = np.frombuffer(private, np.uint8)
            far.channel.register(
                Region(name="copy", address=view.ctypes.data, length=8192, fd=arena.region.fd)
            )
            operation = RemoteOp(Span(NAME, 0, 8192), "copy", 0)
            assert errors(submit("read", near, near.connect(far), [operation])) == [None]
            assert set(near.bytes[:8192].tolist()) == {2}
            far.channel.deregister("copy")
            del view


def test_registering_again_under_one_name_gives_the_new_memory(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    connection = near.connect(far)
    for round_ in range(20):
        far.channel.deregister(NAME)
        with create_region(NAME, LENGTH) as fresh:
            region_view(fresh.region)[:] = round_
            far.channel.register(fresh.region)
            assert errors(submit("read", near, connection, whole(4096))) == [None]
            assert set(near.bytes[:4096].tolist()) == {round_}
            far.channel.deregister(NAME)


def test_what_cannot_be_registered_is_told_with_the_number(ends: Ends) -> None:
    end = ends.open()
    memory = np.zeros(4096, np.uint8)
    for number in range(4094):  # beside the one that is there
        end.channel.register(Region(name=f"r{number}", address=memory.ctypes.data, length=1))
    one_more = Region(name="one more", address=memory.ctypes.data, length=1)
    with pytest.raises(KVFerryError, match=r"4095 regions") as caught:
        end.channel.register(one_more)
    assert caught.value.kind is ErrorKind.CAPACITY
    end.channel.deregister("r0")
    end.channel.register(one_more)


@pytest.mark.parametrize("name", ["half \ud800", "n" * 1025])
def test_a_name_that_peers_could_not_read_is_refused(ends: Ends, name: str) -> None:
    near, far = ends.open(), ends.open()
    with pytest.raises(KVFerryError, match="cannot be told to peers"):
        far.channel.register(Region(name=name, address=far.region.address, length=1))
    far.channel.register(Region(name="n" * 1024, address=far.region.address, length=1))
    assert "n" * 1024 in near.connect(far).regions()


def test_writes_that_a_slow_peer_has_not_read_go_out_later(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    fill(near, 10)
    operations = [RemoteOp(Span(NAME, number, 1), NAME, number) for number in range(20_000)]
    assert set(errors(submit("write", near, near.connect(far), operations))) == {None}
    assert np.array_equal(near.bytes[:20_000], far.bytes[:20_000])
    assert not far.bytes[20_000:].any()
