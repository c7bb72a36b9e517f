"""What an author reads when a backend has a mistake: the law that failed, and why."""

from __future__ import annotations

import os
import re
from textwrap import dedent

import pytest

from kvferry.testing.fake_distributions import importable

from .folder_store import TESTS, install

pytest_plugins = ("pytester",)

OPTIONS = ("-q", "-p", "kvferry.testing.plugin", "-p", "no:cacheprovider")


def open_folders() -> set[int]:
    """Descriptors of this process that the plugin may have left: it locks folders."""
    return {int(each) for each in os.listdir("/proc/self/fd") if os.path.isdir(f"/proc/self/fd/{each}")}


def run(pytester: pytest.Pytester, laws: str, *mistakes: tuple[str, str], options: str = "-x") -> str:
    """The output of these laws over the plugin with its mistakes. Closes what a mistake leaves open."""
    site = pytester.mkdir("site")
    install(site, mistakes)
    pytester.makepyfile(test_author=dedent(TESTS))
    before = open_folders()
    with importable(site):
        output = pytester.runpytest_inprocess(*OPTIONS, options, "-k", laws).stdout.str()
    for descriptor in open_folders() - before:
        os.close(descriptor)
    return output


def test_a_backend_without_mistakes_passes_every_law(pytester: pytest.Pytester) -> None:
    output = run(pytester, "TestBackend or test_a_configuration_can_hold")
    assert re.search(
        r"TestManifest \(ManifestConformance\): \d+ laws: 1 passed, \d+ not run$", output, re.M
    ), output
    told = re.search(r"TestBackend .*: (\d+) laws: (\d+) passed, 1 not claimed$", output, re.M)
    assert told, output
    assert int(told[1]) == int(told[2]) + 1


BYTES = "test_what_was_stored_is_read"
RECOVER = "        def recover(self):\n            for file in list(self._folder.iterdir()):\n"
FORGOTTEN_RECOVER = RECOVER.replace("def recover", "def recovers")


@pytest.mark.parametrize(
    ("laws", "mistake", "explained"),
    [
        pytest.param(
            BYTES,
            (
                "            file = self._file(header.key)\n",
                "            file = self._connection[header.key]\n",
            ),
            [
                "WriteStatus.FAILED: the backend failed",
                "why  AttributeError(\"'FolderBackend' object has no attribute '_connection'\")",
                "raised by the backend:",
                "in write_one",
                "file = self._connection[header.key]",
            ],
            id="what-the-backend-raised",
        ),
        pytest.param(
            BYTES,
            ("return WriteStatus.STORED", "return None"),
            ["write_one returned None, not a WriteStatus", "return WriteStatus.STORED or"],
            id="a-write-that-returns-nothing",
        ),
        pytest.param(
            BYTES,
            ("return ReadStatus.FOUND", "return True"),
            ["read_one returned True, not a ReadStatus"],
            id="a-read-that-returns-true",
        ),
        pytest.param(
            "test_a_killed_process",
            ("            half.rename(file)\n", "            half.rename(file / 'x')\n"),
            ["the child failed to store a chunk: WriteStatus.FAILED: the store failed", "in write_one"],
            id="what-a-child-process-raised",
        ),
        pytest.param(
            "test_a_configuration_can_hold_every_option",
            ("sync: bool = False", 'sync: Literal["off", "on"] = "off"'),
            [
                "backend 'folder' of plugin 'folder' (folder 1.0): FolderOptions.sync: "
                "its options class asks for Literal, which a configuration cannot hold",
                "fix  use bool, int,",
            ],
            id="an-option-that-no-configuration-can-hold",
        ),
        pytest.param(
            "test_ranks_of_one_shard_keep_apart",
            ("-{context.rank}-", "-"),
            ["another rank of the same shard was refused while the first was open", "the folder is in use"],
            id="ranks-in-one-place",
        ),
        pytest.param(
            "test_instances_keep_apart",
            ("{context.instance}-", ""),
            ["another instance was refused while the first was open", "the folder is in use"],
            id="instances-in-one-place",
        ),
        pytest.param(
            "test_another_shard_is_never_found",
            ("-{context.shard.hex()}", ""),
            ["test_another_shard_is_never_found"],
            id="shards-in-one-place",
        ),
        pytest.param(
            "test_a_record_under_another_key",
            ("if header is None or header.key != key:", "if header is None:"),
            ["expected MISS or CORRUPT where the record of another key lies, got ReadStatus.FOUND"],
            id="a-read-that-believes-any-record",
        ),
        pytest.param(
            "test_a_span_of_another_length",
            ("            if len(value) != len(into):\n                return ReadStatus.CORRUPT\n", ""),
            [
                "expected MISS or CORRUPT for a span of 3999 bytes and a value of 4000",
                "got ReadStatus.FAILED",
                "into[:] = value",
            ],
            id="a-read-that-ignores-the-length-of-the-span",
        ),
        pytest.param(
            BYTES,
            (RECOVER, FORGOTTEN_RECOVER),
            ["the spec claims persistent, and the backend refuses to recover(): write  recover"],
            id="persistent-without-recover",
        ),
        pytest.param(
            "test_any_sequence",
            (RECOVER, FORGOTTEN_RECOVER),
            ["the spec claims persistent, and the backend refuses to recover(): write  recover"],
            id="any-sequence-without-recover",
        ),
        pytest.param(
            BYTES,
            ("            super().__init__()\n", ""),
            [
                "FolderBackend is not made completely",
                "why  FolderBackend.__init__ does not call the constructor of ThreadedBackend",
                "fix  begin FolderBackend.__init__ with  super().__init__()",
            ],
            id="a-forgotten-constructor",
        ),
        pytest.param(
            "test_the_claimed_limit",
            (
                "        def close_store(self):\n",
                "        def open(self, context):\n"
                "            super().open(evolve(context, max_value_bytes=None))\n\n"
                "        def close_store(self):\n",
            ),
            ["a value of 100001 bytes is WriteStatus.STORED; the spec says max_value_bytes=100000"],
            id="an-ignored-limit",
        ),
        pytest.param(
            "test_a_second_opener",
            ("fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
            ["open() has to refuse with a KVFerryError, by a lock for example: a second backend"],
            id="no-lock",
        ),
        pytest.param(
            "test_a_second_opener",
            ("except OSError as error:", "except KeyError as error:"),
            ["open() has to refuse with a KVFerryError, by a lock for example: it raised BlockingIOError"],
            id="a-lock-that-raises-what-it-likes",
        ),
        pytest.param(
            "test_a_flipped_bit",
            ("if zlib.crc32(value) != checksum:", "if False:"),
            ["expected MISS or CORRUPT after one bit of the last byte was flipped, of a record of 2016"],
            id="no-checksum",
        ),
        pytest.param(
            "test_a_record_of_another_length",
            ("len(record) == end + 4 + header.size", "len(record) >= end + 4 + header.size"),
            ["after it was put behind itself once more, of a record of"],
            id="no-length",
        ),
    ],
)
def test_a_mistake_is_noticed_and_explained(
    pytester: pytest.Pytester,
    laws: str,
    mistake: tuple[str, str],
    explained: list[str],
) -> None:
    output = run(pytester, laws, mistake)
    assert "1 failed" in output, output
    for words in explained:
        assert words in output, output


def test_a_lock_that_is_left_is_told_before_what_it_leads_to(pytester: pytest.Pytester) -> None:
    mistake = (
        "        def close_store(self):\n            os.close(self._lock)\n",
        "        def close_store(self):\n            pass\n",
    )
    output = run(pytester, "test_any_sequence", mistake)
    assert "the folder is in use" in output, output
    assert "is a lock or a descriptor left by close_store?" in output
    assert "Inconsistent data generation" not in output


def test_simple_laws_come_before_those_of_many_calls(pytester: pytest.Pytester) -> None:
    lines = run(pytester, "TestBackend", options="--collect-only").splitlines()
    laws = [line.rpartition("::")[2] for line in lines if "::TestBackend::" in line]
    assert laws.index(BYTES) < laws.index("test_a_killed_process_loses_nothing_acknowledged")
    assert laws[-1] == "test_any_sequence_of_calls_acts_like_a_dictionary"
