"""Mistakes that an author could make in the example, and the law that must notice each."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from kvferry.testing.fake_distributions import fake_distribution


@frozen
class Mutant:
    """In the files below ``src/acme_lmdb``, each text of ``edits`` becomes another, and then ``law``
    must fail."""

    name: str
    law: str
    edits: tuple[tuple[str, str, str], ...]
    """File, old text, new text."""

    @property
    def number(self) -> int:
        return MUTANTS.index(self)

    @property
    def plugin(self) -> str:
        """Its name as a plugin and as a package, so that many can be installed side by side."""
        return f"acme_lmdb_{self.number}"

    @property
    def law_id(self) -> str:
        of_manifest = "import" in self.law or "option" in self.law
        suite = "TestAcmeManifest" if of_manifest else "TestAcmeBackend"
        return f"{self.plugin}/test_{self.plugin}.py::{suite}::{self.law}"

    def plant(self, source: Path, root: Path) -> None:
        """Write the mistaken plugin and its tests into ``root``, as an installed distribution."""
        package = source / "src/acme_lmdb"
        texts = {path.name: path.read_text() for path in package.glob("*.py")}
        for file, old, new in self.edits:
            assert texts[file].count(old) == 1, f"{old!r} is not there once"
            texts[file] = texts[file].replace(old, new)
        fake_distribution(
            root,
            f"acme-lmdb-{self.number}",
            entry_points={self.plugin: f"{self.plugin}.plugin"},
            source={f"{self.plugin}/{file}": self._renamed(text) for file, text in texts.items()},
        )
        tests = (source / "tests/test_acme_lmdb.py").read_text()
        (root / self.plugin / f"test_{self.plugin}.py").write_text(self._renamed(tests))

    def _renamed(self, text: str) -> str:
        return text.replace("acme_lmdb", self.plugin)


MUTANTS = (
    Mutant(
        "reads wrong bytes",
        "test_what_was_stored_is_read",
        (("backend.py", "into[:] = value", "into[:] = bytes(value)[::-1]"),),
    ),
    Mutant(
        "believes any record under the key",
        "test_a_record_under_another_key_is_never_data",
        (
            ("record.py", "if header is None or header.key != key:", "if header is None:"),
            ("backend.py", "if header is None or header.key.to_bytes() != name:", "if header is None:"),
        ),
    ),
    Mutant(
        "forgets the checksum",
        "test_a_flipped_bit_is_never_data",
        (("record.py", "return value if zlib.crc32(value) == checksum else None", "return value"),),
    ),
    Mutant(
        "forgets the length",
        "test_a_record_of_another_length_is_never_data",
        (
            (
                "record.py",
                "return header if len(record) == end + CHECKSUM.size + header.size else None",
                "return header if len(record) >= end + CHECKSUM.size + header.size else None",
            ),
        ),
    ),
    Mutant(
        "completes twice",
        "test_every_ticket_ends_exactly_once",
        (
            (
                "backend.py",
                "    def close_store(self) -> None:",
                """    def write(self, batch, deadline):
        ticket = super().write(batch, deadline)
        ticket.on_done(lambda done: done.complete(done.results))
        return ticket

    def close_store(self) -> None:""",
            ),
        ),
    ),
    Mutant(
        "closes without waiting",
        "test_closing_ends_every_ticket",
        (
            (
                "backend.py",
                "    def close_store(self) -> None:",
                """    def close(self, deadline):
        pass

    def close_store(self) -> None:""",
            ),
        ),
    ),
    Mutant(
        "writes beside the span",
        "test_a_read_touches_its_span_alone",
        (
            (
                "backend.py",
                "    def close_store(self) -> None:",
                """    def read(self, batch, deadline):
        for _, span in batch:
            self._context.view(span._replace(offset=span.offset + span.length, length=1))[:] = b"!"
        return super().read(batch, deadline)

    def close_store(self) -> None:""",
            ),
        ),
    ),
    Mutant(
        "keeps the memory for later",
        "test_memory_is_left_alone_once_a_ticket_ended",
        (
            (
                "backend.py",
                "    def close_store(self) -> None:",
                """    def read(self, batch, deadline):
        for view in getattr(self, "_kept", ()):
            view[:1] = b"!"
        self._kept = [self._context.view(span) for _, span in batch]
        return super().read(batch, deadline)

    def close_store(self) -> None:""",
            ),
        ),
    ),
    Mutant(
        "exceeds the capacity",
        "test_the_capacity_is_never_exceeded",
        (
            (
                "backend.py",
                "if self._used + len(name) + len(record) > self._capacity:",
                "if self._used > self._capacity:",
            ),
        ),
    ),
    Mutant(
        "starts counting anew after a restart",
        "test_capacity_counts_what_a_restart_found",
        (
            (
                "backend.py",
                "self._used = sum(len(key) + len(record) for key, record in reading.cursor())",
                "self._used = 0",
            ),
        ),
    ),
    Mutant(
        "never gives room back",
        "test_room_comes_back",
        (("backend.py", "        self._used -= len(name) + len(record)\n", ""),),
    ),
    Mutant(
        "replaces what exists",
        "test_a_key_that_exists_is_left_as_it_is",
        (("backend.py", "if writing.get(name) is not None:", "if writing.get(name) == record:"),),
    ),
    Mutant(
        "says it deleted what was not there",
        "test_deleting_twice_is_the_same_as_once",
        (("backend.py", "return DeleteStatus.ABSENT", "return DeleteStatus.DELETED"),),
    ),
    Mutant(
        "fills short spans",
        "test_a_span_of_another_length_is_not_found",
        (
            (
                "backend.py",
                "if value is None or len(value) != len(into):",
                "if value is None or len(value) < len(into):",
            ),
            ("backend.py", "into[:] = value", "into[:] = value[: len(into)]"),
        ),
    ),
    Mutant(
        "lets layouts share records",
        "test_another_shard_is_never_found",
        (("backend.py", "encode() + context.shard", "encode()"),),
    ),
    Mutant(
        "fails on spans of another length",
        "test_a_span_of_another_length_is_not_found",
        (
            (
                "backend.py",
                "if value is None or len(value) != len(into):",
                "if value is None:",
            ),
        ),
    ),
    Mutant(
        "lets ranks share a store",
        "test_ranks_of_one_shard_keep_apart",
        (("backend.py", "{context.instance}-{context.rank}", "{context.instance}"),),
    ),
    Mutant(
        "lets instances share a store",
        "test_instances_keep_apart",
        (("backend.py", "{context.instance}-{context.rank}", "{context.rank}"),),
    ),
    Mutant(
        "claims to be persistent and cannot recover",
        "test_what_was_stored_is_read",
        (("backend.py", "def recover(self)", "def recovers(self)"),),
    ),
    Mutant(
        "has an option that no configuration can hold",
        "test_a_configuration_can_hold_every_option",
        (
            ("options.py", "    path: str\n", "    path: Path\n"),
            (
                "options.py",
                "from attrs import frozen\n",
                "from pathlib import Path\n\nfrom attrs import frozen\n",
            ),
        ),
    ),
    Mutant(
        "loses a fact of the header",
        "test_a_restart_finds_everything_that_was_stored",
        (
            (
                "record.py",
                "return header.to_bytes()",
                "return __import__('attrs').evolve(header, owner='').to_bytes()",
            ),
        ),
    ),
    Mutant(
        "acknowledges before it is stored",
        "test_a_killed_process_loses_nothing_acknowledged",
        (
            (
                "backend.py",
                "    def read_one(self, key: ChunkKey, into: memoryview) -> ReadStatus:",
                """    def write_one(self, header, value):
        self._held = [*getattr(self, "_held", ()), (header, bytes(value))]
        return WriteStatus.STORED

    def read_one(self, key: ChunkKey, into: memoryview) -> ReadStatus:""",
            ),
        ),
    ),
    Mutant(
        "answers what it does not claim",
        "test_probe_is_there_exactly_when_claimed",
        (
            (
                "backend.py",
                "    def close_store(self) -> None:",
                """    def probe_one(self, key):
        return None

    def close_store(self) -> None:""",
            ),
        ),
    ),
    Mutant(
        "claims what it cannot do",
        "test_instances_find_each_other_s_chunks",
        (("plugin.py", "persistent=True,", "persistent=True, shared=True,"),),
    ),
    Mutant(
        "imports its store in the entry module",
        "test_no_implementation_is_imported_early",
        (("plugin.py", "from kvferry.api import", "import acme_lmdb.backend\nfrom kvferry.api import"),),
    ),
)
