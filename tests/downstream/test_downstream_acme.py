"""A third party's backend: built, installed beside kvferry, proved by the kit, and broken on purpose."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.downstream.environment import ACME, ROOT, Downstream
from tests.downstream.mutants import MUTANTS, Mutant

PAGE = (ROOT / "docs/write-a-backend.md").read_text(encoding="utf-8")
PAGE_REPORT = re.findall(r"^```text\n(tests/.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]


@pytest.fixture(scope="module")
def downstream(tmp_path_factory: pytest.TempPathFactory) -> Downstream:
    made = Downstream(tmp_path_factory.mktemp("downstream"))
    made.build()
    return made


def test_it_passes_every_law_that_it_claims(downstream: Downstream) -> None:
    done = downstream.pytest(cwd=ACME)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest, backend = re.findall(r"^\S+::(\w+ \(\w+\): .*)$", done.stdout, re.MULTILINE)
    assert re.fullmatch(r"TestAcmeManifest \(ManifestConformance\): (\d+) laws: \1 passed", manifest)
    counts = re.fullmatch(
        r"TestAcmeBackend \(BackendConformance\): (\d+) laws: (\d+) passed, 1 not claimed", backend
    )
    assert counts, backend
    assert int(counts[1]) == int(counts[2]) + 1 > 50
    for line in PAGE_REPORT.splitlines():
        assert line in done.stdout.splitlines(), f"the page for authors shows {line!r}"


def test_the_plugin_is_found_and_described(downstream: Downstream) -> None:
    listed = json.loads(downstream.kvferry("plugins", "--format", "json").stdout)
    (row,) = (row for row in listed["plugins"] if row["name"] == "acme_lmdb")
    assert row["state"] == "found"
    assert row["distributions"] == [{"name": "acme-kvferry-lmdb", "version": "1.0"}]


def tiers(downstream: Downstream, *, behind_memory: bool) -> Path:
    file = downstream.folder / "far.yaml"
    memory = "  cpu: {use: cpu, capacity: 32MiB}\n" if behind_memory else ""
    file.write_text(
        f"plugins: [acme_lmdb{', backend_cpu' if behind_memory else ''}]\ntiers:\n{memory}"
        f"  far: {{use: lmdb, path: {downstream.folder}/store, capacity: 64MiB, in_flight: 8MiB}}\n"
    )
    return file


def test_a_tier_by_key_is_accepted_behind_memory(downstream: Downstream) -> None:
    done = downstream.kvferry("check", "--format", "json", tiers(downstream, behind_memory=True))
    assert done.returncode == 0, done.stdout
    (file,) = json.loads(done.stdout)["files"]
    about_far = {
        finding["id"]: finding["outcome"]
        for finding in file["rules"]["findings"]
        if finding["member"] == "far"
    }
    assert about_far["CORE005"] == about_far["CORE007"] == about_far["CORE009"] == "ok"


def test_a_tier_by_key_is_refused_as_the_first(downstream: Downstream) -> None:
    done = downstream.kvferry("check", tiers(downstream, behind_memory=False))
    assert done.returncode != 0
    assert "CORE003" in done.stdout
    assert "the backend lmdb does not give plain memory" in done.stdout


def test_its_options_are_checked_like_core_s_own(downstream: Downstream) -> None:
    file = downstream.folder / "typo.yaml"
    file.write_text("plugins: [acme_lmdb]\ntiers:\n  far: {use: lmdb, pth: /tmp/x, capacity: 64MiB}\n")
    done = downstream.kvferry("check", file)
    assert done.returncode != 0
    assert "did you mean 'path'?" in done.stdout + done.stderr


@pytest.fixture(scope="module")
def verdicts(downstream: Downstream, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of one run over all mistakes, each against the law that should notice it."""
    root = tmp_path_factory.mktemp("mistakes")
    for mutant in MUTANTS:
        mutant.plant(ACME, root)
    options = ("-c", ACME / "pyproject.toml", "--rootdir", root)
    done = downstream.pytest(*options, *(mutant.law_id for mutant in MUTANTS), cwd=root, path=str(root))
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mistake_is_noticed_by_its_law(verdicts: str, mutant: Mutant) -> None:
    report = verdicts.partition("kvferry conformance")[2]
    (told,) = re.findall(rf"^{mutant.law_id.rpartition('::')[0]} .*\n(.*)$", report, re.MULTILINE)
    assert told == f"  failed       {mutant.law}", verdicts
