"""What is known of a host before a tier is opened, and what the options take."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import ByteSize, HostEnvironment
from kvferry_backend_ssd.facts import (
    FILE_SYSTEMS,
    IO_URING,
    POSSIBLE,
    FileSystem,
    file_system_of,
    probe_facts,
)
from kvferry_backend_ssd.options import SSDOptions
from kvferry_backend_ssd.refusal import uring_refusal

MIB = 1 << 20
MOUNTS = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw,nosuid - proc proc rw
24 22 254:1 / /mnt/my\040disk rw - xfs /dev/vdb rw,attr2
25 22 0:40 / /mnt/frozen ro,relatime - ext4 /dev/vdc rw
26 22 0:41 / /mnt/remounted rw,relatime - ext4 /dev/vdd ro
27 22 0:42 / /mnt/far rw - nfs4 server:/export rw
28 22 0:43 / /run rw master:3 propagate_from:2 - tmpfs tmpfs rw,size=100k
nonsense
"""


@pytest.fixture
def host(tmp_path: Path) -> HostEnvironment:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    (tmp_path / "mnt/my disk").mkdir(parents=True)
    return HostEnvironment(root=str(tmp_path))


def test_file_systems_are_told_with_kind_mode_size_and_place(host: HostEnvironment) -> None:
    facts = {fact.path: fact for fact in probe_facts(host)}
    systems = {s.where: s for text in facts[FILE_SYSTEMS].value if (s := FileSystem.parse(text))}
    assert set(systems) == {"/", "/mnt/my disk", "/mnt/frozen", "/mnt/remounted", "/mnt/far", "/run"}
    room = os.statvfs(host.root)
    total = systems["/"].total
    assert total is not None
    assert 0 <= room.f_blocks * room.f_frsize - total < MIB
    assert systems["/mnt/my disk"].kind == "xfs"
    assert systems["/mnt/my disk"].free is not None
    assert [systems[where].writable for where in ("/", "/mnt/frozen", "/mnt/remounted")] == [
        True,
        False,
        False,
    ]
    assert systems["/mnt/far"] == FileSystem("nfs4", True, None, None, "/mnt/far")
    assert facts[FILE_SYSTEMS].origin == "probe /proc/self/mountinfo"


def test_of_two_file_systems_at_one_place_only_the_one_on_top_is_told(host: HostEnvironment) -> None:
    table = Path(host.root) / "proc/self/mountinfo"
    table.write_text(MOUNTS + "29 24 0:44 / /mnt/my\\040disk ro - tmpfs tmpfs ro\n")
    facts = {fact.path: fact for fact in probe_facts(host)}
    systems = [s for text in facts[FILE_SYSTEMS].value if (s := FileSystem.parse(text))]
    assert [system.kind for system in systems if system.where == "/mnt/my disk"] == ["tmpfs"]


def test_a_host_without_a_table_of_mounts_gives_no_such_fact(tmp_path: Path) -> None:
    paths = [fact.path for fact in probe_facts(HostEnvironment(root=str(tmp_path)))]
    assert paths == [IO_URING]


def test_the_fact_about_io_uring_is_what_a_tier_would_meet(host: HostEnvironment) -> None:
    facts = {fact.path: fact.value for fact in probe_facts(host)}
    assert facts[IO_URING] == (uring_refusal() or POSSIBLE)


SYSTEMS = tuple(
    FileSystem(kind, True, MIB, MIB, where).to_text()
    for kind, where in (("a", "/"), ("b", "/mnt"), ("c", "/mnt/x y"), ("d", "/mnt"))
)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "a"),
        ("/var/cache", "a"),
        ("/mnt", "d"),
        ("/mnt/", "d"),
        ("/mntx", "a"),
        ("/mnt/x y/deep", "c"),
        ("/mnt/x y/../z", "d"),
        ("relative", None),
    ],
)
def test_a_path_lies_on_the_deepest_mount_above_it(path: str, kind: str | None) -> None:
    found = file_system_of(path, SYSTEMS)
    assert (found.kind if found else None) == kind


@given(
    st.from_regex(r"[a-z0-9.]{1,9}", fullmatch=True),
    st.booleans(),
    st.none() | st.integers(0, MIB - 1) | st.integers(1, 2**40).map(lambda size: size * MIB),
    st.text(min_size=1).map(lambda text: "/" + text),
)
def test_a_file_system_comes_back_from_its_text(
    kind: str, writable: bool, size: int | None, where: str
) -> None:
    system = FileSystem(kind, writable, size, size, where)
    assert FileSystem.parse(system.to_text()) == system


@given(st.integers(MIB, 2**60))
def test_a_size_is_told_in_whole_mib_and_never_as_more_than_there_is(size: int) -> None:
    told = FileSystem.parse(FileSystem("ext4", True, size, None, "/").to_text())
    assert told is not None
    assert told.total is not None
    assert told.total <= size < told.total + MIB


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("ext4 rw 1TiB 800GB /", 1 << 40),
        ("nfs4 rw - - /mnt", None),
    ],
)
def test_sizes_may_be_written_by_hand_with_any_unit(text: str, total: int | None) -> None:
    told = FileSystem.parse(text)
    assert told is not None
    assert told.total == total


@pytest.mark.parametrize(
    "text", ["", "ext4 /", "ext4 rw 100 50 /", "ext4 maybe 1GiB 1GiB /", "ext4 rw 1GiB x /"]
)
def test_a_text_that_is_no_file_system_is_none(text: str) -> None:
    assert FileSystem.parse(text) is None


@pytest.mark.parametrize(
    ("wrong", "what", "remedy"),
    [
        ({"path": " "}, "names no folder", "/var/cache/kvferry"),
        ({"path": "/a\x00b"}, "zero character", "remove it"),
        ({"path": "/a\udcff\ud800"}, "half a character", "remove it"),
        ({"path": "cache/kv"}, "whole path", "begin it with '/'"),
        ({"path": "./kv"}, "whole path", "begin it with '/'"),
        ({"path": "~/kv"}, "whole path", "'~' and variables are not replaced"),
        ({"path": "$HOME/kv"}, "whole path", "'~' and variables are not replaced"),
        ({"queue_depth": 0}, "is below 1", "write 1 or more"),
        ({"queue_depth": 5000}, "is above 1024", "write 1024 or less"),
        ({"slot": ByteSize(100)}, "is below 4KiB", "write 4KiB or more"),
    ],
)
def test_options_that_cannot_work_are_refused_with_a_remedy(
    wrong: dict[str, object], what: str, remedy: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(what)) as caught:
        SSDOptions(**{"path": "/mnt", **wrong})  # type: ignore[arg-type]
    assert remedy in caught.value.remedy  # type: ignore[attr-defined]
