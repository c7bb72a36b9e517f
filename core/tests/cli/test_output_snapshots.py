"""What a reader sees of ``kvferry check`` and ``kvferry rules``, word for word.

The texts are in ``snapshots/``. After a change that is meant, write them anew with
``KVFERRY_UPDATE_SNAPSHOTS=1`` in the environment of this test, and read the difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry import __version__

from .conftest import CommandLine, Ran

FOLDER = Path(__file__).parent / "snapshots"
UPDATE = "KVFERRY_UPDATE_SNAPSHOTS"

LOUD = """
    from kvferry.api import (
        Check, ConnectorSpec, Example, Known, Manifest, Rule, Severity, hookimpl,
    )

    MANIFEST = Manifest(name="loud", api=">=1.0,<2", rule_prefix="LOUD")

    def rule(number, severity, most, requires=()):
        return Rule(
            id=f"LOUD00{number}",
            severity=severity,
            when=Known("chunk_tokens"),
            require=Check(f"chunk_tokens <= {most}", ("chunk_tokens",), lambda tokens: tokens <= most),
            message="chunks of {chunk_tokens} tokens are too long",
            fix=f"set chunk_tokens to {most} or less",
            source="measured: make bench",
            requires=requires,
            examples=(
                Example(facts={"chunk_tokens": most}, passes=True),
                Example(facts={"chunk_tokens": most + 1}, passes=False),
            ),
        )

    @hookimpl
    def kvferry_connectors():
        return [ConnectorSpec(name="loud", options="PACKAGE.parts:Options")]

    @hookimpl
    def kvferry_rules():
        return [
            rule(1, Severity.ERROR, 1024),
            rule(2, Severity.WARNING, 512, requires=("LOUD001",)),
            rule(3, Severity.NOTE, 300, requires=(REQUIRED,)),
        ]
"""
LOUD_PARTS = """
    from attrs import frozen

    @frozen
    class Options:
        pass
"""
DISK = """
    from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

    MANIFEST = Manifest(name="backend_disk", api=">=1.0,<2", rule_prefix="DISK")

    @hookimpl
    def kvferry_backends():
        return [
            BackendSpec(
                name="disk",
                factory="zoo_disk.parts:Backend",
                options="zoo_disk.parts:Options",
                capabilities=BackendCapabilities(persistent=True, max_value_bytes=64 << 20),
            )
        ]
"""
DISK_PARTS = """
    from attrs import frozen

    from kvferry.testing.keyed_backends import NullBackend

    class Backend(NullBackend):
        def __init__(self, options, capacity):
            self.path = options.path

    @frozen(kw_only=True)
    class Options:
        path: str
"""
TIERS = """\
plugins: [backend_tape, backend_disk]
tiers:
  cpu: {use: tape, capacity: 8GiB}
  ssd: {use: disk, path: /cache, capacity: 100GiB}
"""
CONFIG = """\
plugins: [backend_tape, loud]
chunk_tokens: 256
tiers:
  cpu: {use: tape, capacity: 8GiB}
"""
THERE = """\
host.memory_bytes: 32GiB
host.huge_pages_shmem: advise
native.available: true
native.why: installed
"""


class Desk:
    """A shell with a plugin that has a rule of every severity, and a file about another host, so that
    no text depends on this machine."""

    def __init__(self, shell: CommandLine) -> None:
        self.shell = shell
        self.loud("loud", "LOUD002")
        self.there = shell.write(THERE, "there.yaml")

    def loud(self, name: str, required: str) -> None:
        """Install the plugin; its last rule requires this id."""
        plugin = LOUD.replace("REQUIRED", repr(required)).replace('"loud"', repr(name))
        package = f"zoo_{name}"
        self.shell.install(f"acme-{name}", name, package, plugin.replace("PACKAGE", package), LOUD_PARTS)

    def check(self, *texts: str, there: str = THERE) -> Ran:
        self.shell.write(there, "there.yaml")
        names = ["c.yaml"] if len(texts) == 1 else [f"{letter}.yaml" for letter in "abcd"]
        files = [self.shell.write(text, name) for text, name in zip(texts, names, strict=False)]
        return self.shell.run("check", "--facts", self.there, *files)

    def check_tiers(self, *texts: str, engine: str = "") -> Ran:
        """Like :meth:`check`, with a backend that keeps chunks by key in a folder."""
        self.shell.install("acme-disk", "backend_disk", "zoo_disk", DISK, DISK_PARTS)
        return self.check(*texts, there=THERE + engine)


def engine(chunk: str) -> str:
    sizes = f"workers: 1, block_tokens: 128, chunk_bytes: {chunk}"
    return f"engine: {{{sizes}, device: cpu, group_kinds: [full]}}\n"


def tokens(count: int) -> str:
    return CONFIG.replace("256", str(count))


def clean(desk: Desk) -> Ran:
    return desk.check(CONFIG, there=THERE + engine("4MiB"))


def error_and_what_stands_on_it(desk: Desk) -> Ran:
    return desk.check(tokens(2048))


def warning_and_what_stands_on_it(desk: Desk) -> Ran:
    return desk.check(tokens(768))


def note(desk: Desk) -> Ran:
    return desk.check(tokens(384))


def unverified(desk: Desk) -> Ran:
    return desk.check(CONFIG, there="native.available: true\n")


def waivers_of_every_kind(desk: Desk) -> Ran:
    waivers = (
        "waive:\n  LOUD001: the bench wants it\n  LOUD002: later\n  CORE042: a laptop checks this file\n"
        "  CORE001: no reason helps\n  LOUD9: gone\n  CORE023: no engine here\n"
    )
    return desk.check(tokens(2048) + waivers)


def template_over_tiers(desk: Desk) -> Ran:
    return desk.check(CONFIG.replace("8GiB", "8GiB, reel: 12"))


def two_tiers(desk: Desk) -> Ran:
    return desk.check_tiers(TIERS, engine=engine("4MiB"))


def two_tiers_that_do_not_fit_together(desk: Desk) -> Ran:
    first = TIERS.replace("8GiB", "8GiB, load_deadline: 1s, store: write_through")
    more = "  far: {use: disk, path: /cache/, capacity: 80MiB, store: write_on_evict, in_flight: 4GiB}\n"
    return desk.check_tiers(first.replace("100GiB", "4GiB, in_flight: 64MiB") + more, engine=engine("80MiB"))


def tiers_in_the_wrong_order(desk: Desk) -> Ran:
    head, tiers, cpu, ssd = TIERS.splitlines(keepends=True)
    return desk.check_tiers(head + tiers + ssd + cpu)


def two_tiers_in_memory(desk: Desk) -> Ran:
    return desk.check_tiers(TIERS + "  more: {use: tape, capacity: 2GiB}\n")


def several_instances_in_one_folder(desk: Desk) -> Ran:
    return desk.check_tiers(TIERS, TIERS, TIERS + "instance: c\n")


def several_files(desk: Desk) -> Ran:
    one = CONFIG.replace("8GiB", "20GiB") + "instance: x\nmodel_identity: m\n"
    return desk.check(one, one.replace("256", "300"), CONFIG + "instance: y\n")


def several_files_one_at_fault(desk: Desk) -> Ran:
    return desk.check(CONFIG, CONFIG + "tears: 1\n")


def facts_file_with_an_unknown_fact(desk: Desk) -> Ran:
    return desk.check(CONFIG, there=THERE + "host.memory: 3GiB\nsomething.else: 1\n")


def facts_file_with_faults(desk: Desk) -> Ran:
    return desk.check(CONFIG, there="host.memory_bytes: 32\nchunk_tokens: 2\nengine.workers: two\n")


def several_files_on_a_machine_with_a_fault(desk: Desk) -> Ran:
    there = THERE.replace("advise", "never").replace("32GiB", "16GiB").replace("true", "false")
    return desk.check(tokens(384), tokens(2048), there=there)


def variables_that_do_not_count(desk: Desk) -> Ran:
    desk.shell.environment["KVFERRY__INSTANCE"] = "x"
    return desk.check(CONFIG, CONFIG)


def variables_that_count(desk: Desk) -> Ran:
    desk.shell.environment["KVFERRY__INSTANCE"] = "x"
    files = ["a/c.yaml", "b/c.yaml"]
    for file in files:
        desk.shell.write(CONFIG, file)
    return desk.shell.run("check", "--facts", desk.there, "--with-environment", *files)


def check_at_80_columns(desk: Desk) -> Ran:
    desk.shell.columns = 80
    desk.shell.write("native.available: false\n", "there.yaml")
    desk.shell.write(tokens(2048) + "tears: 1\n", "a.yaml")
    desk.shell.write(tokens(2048), "b.yaml")
    return desk.shell.run("check", "--facts", "there.yaml", "a.yaml", "b.yaml")


def plugin_faults(desk: Desk) -> Ran:
    desk.shell.install("acme-bad", "bad", "zoo_bad", "import zoo_missing_library\n")
    desk.shell.install("acme-odd", "odd", "zoo_odd", "1 / 0\n")
    listed = "[backend_tape, bad, {name: odd, on_error: skip}, lowd]"
    return desk.check(CONFIG.replace("[backend_tape, loud]", listed))


def rules_at_fault(desk: Desk) -> Ran:
    desk.loud("circular", "LOUD003")
    return desk.check(CONFIG.replace("loud", "circular"))


def rule_that_requires_what_is_not_there(desk: Desk) -> Ran:
    desk.loud("dangling", "LOUD01")
    return desk.check(CONFIG.replace("loud", "dangling"))


def configuration_faults(desk: Desk) -> Ran:
    return desk.check('plugins: [backend_tape]\nchunk_token: 1\ntiers: {cpu: {use: tape, capacity: "8"}}\n')


def _on_a_terminal(desk: Desk, columns: int, *words: str) -> Ran:
    desk.shell.columns = columns
    return desk.shell.run(*words, "--plugin", "loud", "--plugin", "backend_tape")


def rules_at_80_columns(desk: Desk) -> Ran:
    return _on_a_terminal(desk, 80, "rules")


def explanation_at_80_columns(desk: Desk) -> Ran:
    return _on_a_terminal(desk, 80, "rules", "explain", "LOUD002", "CORE041", "CORE062")


CASES: tuple[Callable[[Desk], Ran], ...] = (
    clean,
    error_and_what_stands_on_it,
    warning_and_what_stands_on_it,
    note,
    unverified,
    waivers_of_every_kind,
    template_over_tiers,
    two_tiers,
    two_tiers_that_do_not_fit_together,
    tiers_in_the_wrong_order,
    two_tiers_in_memory,
    several_instances_in_one_folder,
    several_files,
    several_files_one_at_fault,
    several_files_on_a_machine_with_a_fault,
    variables_that_do_not_count,
    variables_that_count,
    check_at_80_columns,
    facts_file_with_an_unknown_fact,
    facts_file_with_faults,
    plugin_faults,
    rules_at_fault,
    rule_that_requires_what_is_not_there,
    configuration_faults,
    rules_at_80_columns,
    explanation_at_80_columns,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_text_is_the_one_that_was_agreed(
    shell: CommandLine, case: Callable[[Desk], Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shell.root)
    ran = case(Desk(shell))
    text = f"exit code {ran.code}\n\n{ran.out}{ran.err}".replace(__version__, "VERSION")
    path = FOLDER / f"{case.__name__}.txt"
    if os.environ.get(UPDATE) == "1":
        path.write_text(text)
    assert path.is_file(), f"there is no snapshot yet; write it with {UPDATE}=1"
    assert text == path.read_text()


def test_every_snapshot_belongs_to_a_case() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {case.__name__ for case in CASES}
