"""What an operator relies on: restarts, capacity, order of use, room of other layouts, several processes."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.api import ErrorKind, KVFerryError, WriteStatus
from kvferry.testing.conformance.driver import digest
from kvferry.testing.conformance.keyed_subject import Workbench
from kvferry_backend_ssd.choice import choose_io
from kvferry_backend_ssd.layout import Layout
from kvferry_backend_ssd.options import IOPath
from plugins.backend_ssd.tests.ssd_bench import MIB, workbench
from plugins.backend_ssd.tests.ssd_raw import StoredChunks


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    made = workbench(tmp_path)
    yield made
    made.close_all()


def fill(bench: Workbench, driver, size: int = 8192) -> list:
    """Store until it is full; what is in."""
    stored = []
    for first in range(0, 10_000, 50):
        chunks = bench.chunks(50, size, first)
        results = driver.write(chunks)
        stored += [
            chunk
            for chunk, result in zip(chunks, results, strict=True)
            if result.status is WriteStatus.STORED
        ]
        if any(result.status is WriteStatus.NO_SPACE for result in results):
            return stored
    raise AssertionError("it is never full")


def test_a_smaller_capacity_drops_what_lies_beyond_and_keeps_the_rest(
    bench: Workbench, tmp_path: Path
) -> None:
    driver = bench.open()
    stored = fill(bench, driver)
    driver.close()
    bench.capacity = 3 * MIB
    again = bench.open()
    assert StoredChunks(tmp_path).used_bytes() <= 3 * MIB
    kept = {header.key for header in again.recovered}
    assert 0 < len(kept) < len(stored)
    again.expect([chunk for chunk in stored if chunk[0].key in kept])
    again.expect_missing([(header.key, header.size) for header, _ in stored if header.key not in kept])
    fill(bench, again)
    assert StoredChunks(tmp_path).used_bytes() <= 3 * MIB


def test_a_larger_capacity_keeps_everything_and_holds_more(bench: Workbench, tmp_path: Path) -> None:
    bench.capacity = 3 * MIB
    driver = bench.open()
    stored = fill(bench, driver)
    driver.close()
    bench.capacity = 6 * MIB
    again = bench.open()
    assert len(again.recovered) == len(stored)
    again.expect(stored)
    more = bench.chunks(50, 8192, first=20_000)
    again.store(more)
    again.expect(more)
    assert 3 * MIB < StoredChunks(tmp_path).used_bytes() <= 6 * MIB


def test_a_tier_holds_nearly_as_many_chunks_as_core_expects(tmp_path: Path) -> None:
    bench = workbench(tmp_path, capacity=16 * MIB)
    driver = bench.open(max_value_bytes=256 << 10)
    stored = fill(bench, driver, 256 << 10)
    assert len(stored) >= 16 * MIB // ((256 << 10) + 4096) - 2
    assert StoredChunks(tmp_path).used_bytes() <= 16 * MIB
    bench.close_all()


def test_recovery_gives_the_chunk_used_longest_ago_first(bench: Workbench) -> None:
    driver = bench.open()
    chunks = bench.chunks(6, 5000)
    for chunk in chunks:
        driver.store([chunk])
    for number in (2, 0, 4):
        driver.expect([chunks[number]])
    for _ in range(2):  # nothing is used in between, so another restart finds the same
        driver = bench.reopen(driver)
        order = [header.key for header in driver.recovered]
        assert order == [chunks[number][0].key for number in (1, 3, 5, 2, 0, 4)]
    driver.expect([chunks[1]])
    late = bench.chunk(9, 100)
    driver.store([late])
    driver = bench.reopen(driver)
    order = [header.key for header in driver.recovered]
    assert order == [chunks[number][0].key for number in (3, 5, 2, 0, 4, 1)] + [late[0].key]


def test_the_store_of_another_layout_goes_when_its_room_is_needed(bench: Workbench, tmp_path: Path) -> None:
    bench.capacity = 140 * MIB
    raw = StoredChunks(tmp_path)
    files: list[Path] = []
    for shard in ("one", "two"):
        driver = bench.open(shard=digest(shard))
        driver.store(bench.chunks(10, 8192))
        driver.close()
        files += [path for path in raw.files() if path not in files]
        time.sleep(0.02)  # file times are no finer
    driver = bench.open(shard=digest("three"))
    assert driver.recovered == []
    driver.store(bench.chunks(30, 8192))
    assert set(files) < set(raw.files())
    for first in range(0, 64, 16):
        driver.store(bench.chunks(16, 256 << 10, 100 + first))
    assert files[0] not in raw.files()
    assert files[1] in raw.files()
    assert raw.used_bytes() <= bench.capacity
    driver.close()
    bench.capacity = 20 * MIB
    bench.open(shard=digest("three"))
    assert files[1] not in raw.files()
    assert raw.used_bytes() <= bench.capacity


def test_a_store_of_another_layout_is_found_again_by_that_layout(bench: Workbench) -> None:
    bench.capacity = 256 * MIB
    first = bench.open(shard=digest("one"))
    chunks = bench.chunks(10, 8192)
    first.store(chunks)
    first.close()
    other = bench.open(shard=digest("two"))
    other.store([bench.chunk(0, 8192, edition=1)])
    other.close()
    again = bench.open(shard=digest("one"))
    assert len(again.recovered) == 10
    again.expect(chunks)


def test_a_value_above_the_limit_of_the_engine_is_refused_by_itself(bench: Workbench) -> None:
    driver = bench.open(max_value_bytes=8192)
    above, fits = bench.chunk(0, 8193), bench.chunk(1, 8192)
    refused, stored = driver.write([above, fits])
    assert refused.status is WriteStatus.FAILED
    assert refused.error is not None
    assert refused.error.kind is ErrorKind.CAPACITY
    assert stored.status is WriteStatus.STORED
    driver.expect([fits])


def test_a_capacity_that_holds_no_chunk_is_refused_with_the_least_that_would(tmp_path: Path) -> None:
    bench = workbench(tmp_path, capacity=MIB)
    with pytest.raises(KVFerryError) as caught:
        bench.open(max_value_bytes=MIB)
    assert caught.value.kind is ErrorKind.CAPACITY
    least = Layout(MIB + 4096).bytes_for(1) + 4096
    assert f"{least} bytes" in caught.value.remedy
    bench.capacity = least
    driver = bench.open(max_value_bytes=MIB)
    driver.store([bench.chunk(0, MIB)])
    assert StoredChunks(tmp_path).used_bytes() <= least
    bench.close_all()


def test_long_headers_take_room_and_come_back(bench: Workbench) -> None:
    driver = bench.open(max_value_bytes=8192)
    aliases = tuple((digest("alias", number), 16 * number + 16) for number in range(90))
    chunks = [bench.chunk(number, 8192, aliases=aliases, owner="o" * 700) for number in range(5)]
    driver.store(chunks)
    again = bench.reopen(driver, max_value_bytes=8192)
    assert {header.key: header for header in again.recovered} == {header.key: header for header, _ in chunks}
    again.expect(chunks)


def test_a_missing_parent_folder_is_told_and_nothing_is_made(tmp_path: Path) -> None:
    bench = workbench(tmp_path / "not" / "there")
    with pytest.raises(KVFerryError) as caught:
        bench.open()
    assert caught.value.kind is ErrorKind.IO
    assert caught.value.where == str(tmp_path / "not" / "there")
    assert "ENOENT" in caught.value.why
    assert "make the folder above it" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_lies_in_place_of_the_folder_is_named_and_left_alone(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "tier"
    if kind == "file":
        place.write_text("precious")
    else:
        place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(KVFerryError) as caught:
        workbench(place).open()
    assert caught.value.kind is ErrorKind.IO
    assert caught.value.where == str(place)
    assert "ENOTDIR" in caught.value.why
    assert "choose a path that is a folder" in caught.value.remedy
    assert list(tmp_path.iterdir()) == [place]


def test_a_missing_folder_in_an_existing_one_is_made(tmp_path: Path) -> None:
    bench = workbench(tmp_path / "new")
    driver = bench.open()
    driver.store([bench.chunk(0, 100)])
    bench.close_all()
    assert StoredChunks(tmp_path / "new").names()


def test_a_path_that_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KVFerryError) as caught:
        workbench(tmp_path / "file").open()
    assert "ENOTDIR" in caught.value.why


def test_files_of_others_are_left_alone(bench: Workbench, tmp_path: Path) -> None:
    driver = bench.open()
    (folder,) = [path.parent for path in StoredChunks(tmp_path).files()]
    (folder / "notes.txt").write_text("mine")
    fill(bench, driver)
    driver = bench.reopen(driver)
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_backend_opens_inside_a_running_event_loop(bench: Workbench) -> None:
    async def inside() -> None:
        driver = bench.open()
        driver.store([bench.chunk(0, 5000)])
        driver.expect([bench.chunk(0, 5000)])

    asyncio.run(inside())


HOLDER = """
import sys, time
from pathlib import Path
from plugins.backend_ssd.tests.ssd_bench import workbench
driver = workbench(Path(sys.argv[1])).open()
print("open", flush=True)
sys.stdin.readline()
if sys.argv[2] == "linger":
    time.sleep(0.5)
    driver.close()
    print("closed", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the folder open."""
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), getattr(request, "param", "stay")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_by_the_name_of_the_first(
    bench: Workbench, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(KVFerryError) as caught:
        bench.open(operation_seconds=0.4)
    assert caught.value.kind is ErrorKind.IO
    assert f"process {holder.pid} on {os.uname().nodename}" in caught.value.why
    assert "'conformance'" in caught.value.why
    assert caught.value.remedy


def test_a_killed_owner_holds_nothing(bench: Workbench, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    driver = bench.open()
    driver.store([bench.chunk(0, 100)])


@pytest.mark.parametrize("holder", ["linger"], indirect=True)
def test_an_owner_that_is_about_to_end_is_waited_for(bench: Workbench, holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    driver = bench.open(operation_seconds=60)
    driver.store([bench.chunk(0, 100)])


@pytest.mark.parametrize(
    ("wanted", "refusal", "chosen"),
    [
        (IOPath.AUTO, "", IOPath.IO_URING),
        (IOPath.AUTO, "no", IOPath.THREADS),
        (IOPath.THREADS, "", IOPath.THREADS),
        (IOPath.IO_URING, "", IOPath.IO_URING),
    ],
)
def test_the_io_path_follows_the_option_and_the_kernel(wanted: IOPath, refusal: str, chosen: IOPath) -> None:
    assert choose_io(wanted, "t", lambda: refusal)[0] is chosen


@pytest.mark.parametrize(("direct", "cache"), [(False, "through"), (True, "past")])
def test_the_log_says_where_a_tier_lies_and_how_it_is_reached(
    tmp_path: Path, io_path: IOPath, caplog: pytest.LogCaptureFixture, direct: bool, cache: str
) -> None:
    bench = workbench(tmp_path, io=io_path, direct=direct)
    with caplog.at_level(logging.INFO):
        driver = bench.open()
        cache = cache if driver.backend.direct else "through"  # type: ignore[attr-defined]
        bench.close_all()
    (told,) = caplog.messages
    assert f" in {tmp_path}/" in told
    assert told.endswith(f", with {io_path.value} {cache} the page cache")


def test_io_uring_that_is_demanded_and_refused_says_why() -> None:
    with pytest.raises(KVFerryError) as caught:
        choose_io(IOPath.IO_URING, "t", lambda: "EPERM, says the kernel")
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert "EPERM" in caught.value.why
    assert "io: auto" in caught.value.remedy
