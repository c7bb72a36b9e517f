"""``kvferry docs``, and the pages of this repository that it wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvferry.api import Rule
from kvferry.cli.docs_command import pages, plugins_in
from kvferry.cli.main import main
from kvferry.compat import OwnedRule, rule_faults, run_examples
from kvferry.compat.application import read_paths
from kvferry.plugins import LoadedPlugins, PluginRequest, load_plugins
from kvferry.runtime.catalogue import catalogue_of, own_keys

from .conftest import CommandLine

ROOT = Path(__file__).parents[3]
TREE = ROOT / "plugins"
PAGES = ROOT / "docs" / "generated"


@pytest.fixture(scope="module")
def plugins() -> LoadedPlugins:
    """Every plugin of this repository; one that cannot be loaded fails all that follows."""
    loaded = load_plugins([PluginRequest.parse(name) for name in plugins_in(TREE)])
    loaded.raise_for_faults()
    return loaded


def test_every_plugin_of_the_repository_is_found() -> None:
    names = list(plugins_in(TREE))
    assert len(names) >= len([path for path in TREE.iterdir() if (path / "pyproject.toml").is_file()])
    assert {"backend_cpu", "connector_vllm"} <= set(names)


@pytest.mark.parametrize("name", ["configuration.md", "rules.md"])
def test_the_pages_in_the_repository_are_as_the_code_says(plugins: LoadedPlugins, name: str) -> None:
    written = (PAGES / name).read_text(encoding="utf-8")
    assert written == pages(plugins)[name], "stale; write it with: kvferry docs docs/generated --tree plugins"


def owned_by(rules: tuple[OwnedRule, ...]) -> dict[str, list[Rule]]:
    found: dict[str, list[Rule]] = {}
    for owned in rules:
        found.setdefault(owned.owner, []).append(owned.rule)
    return found


def test_the_rules_of_every_plugin_judge_their_own_examples_right(plugins: LoadedPlugins) -> None:
    prefixes = {
        record.name: record.manifest.rule_prefix for record in plugins.records if record.manifest is not None
    }
    found = owned_by(plugins.rules())
    assert {"core", "backend_cpu", "connector_vllm"} <= set(found)
    problems: list[str] = []
    for owner, rules in found.items():
        # This finds a rule without a passing and a failing example, too.
        problems += rule_faults(rules, prefixes[owner])
        problems += [problem for rule in rules for problem in run_examples(rule)]
    assert problems == []


def test_every_fact_that_a_plugins_rule_reads_has_a_meaning(plugins: LoadedPlugins) -> None:
    catalogue = catalogue_of([plugins])
    unknown = {
        f"{owned.rule.id}: {path}"
        for owned in plugins.rules()
        for path in read_paths(owned)
        if catalogue.find(path) is None and "[capabilities.persistent][path]" not in path
    }
    assert unknown == set()


def test_every_key_of_every_plugin_has_a_meaning(plugins: LoadedPlugins) -> None:
    keys = [key for each in own_keys(plugins) for key in each.keys]
    assert keys
    assert [key.path for key in keys if not key.doc] == []


def test_links_within_the_pages_lead_somewhere(plugins: LoadedPlugins) -> None:
    for text in pages(plugins).values():
        anchors = {heading.lower() for heading in re.findall(r"^#+ (\S+)$", text, re.MULTILINE)}
        links = re.findall(r"\]\(#([^)]+)\)", text)
        assert set(links) <= anchors
        assert set(re.findall(r"\]\(([\w.]+)\)", text)) <= set(pages(plugins))
    assert "](#core001)" in pages(plugins)["rules.md"]


def test_docs_writes_what_is_stale_and_check_only_says_so(shell: CommandLine) -> None:
    folder = shell.root / "pages"
    words = ["docs", str(folder), "--plugin", "backend_tape"]
    stale = shell.run(*words, "--check")
    assert (stale.code, stale.out) == (1, "pages/configuration.md: stale\npages/rules.md: stale\n")
    assert not folder.exists()
    written = shell.run(*words)
    assert (written.code, written.out) == (0, "pages/configuration.md: written\npages/rules.md: written\n")
    assert "### TAPE001\n" in (folder / "rules.md").read_text()
    assert "| `tiers.*.reel` | whole number | `1` |" in (folder / "configuration.md").read_text()
    assert shell.run(*words, "--check").code == 0
    (folder / "rules.md").write_text("older\n")
    assert shell.run(*words, "--check").out == "pages/rules.md: stale\n"
    assert shell.run(*words).out == "pages/rules.md: written\n"


def test_docs_refuses_to_leave_a_plugin_out(shell: CommandLine) -> None:
    ran = shell.run("docs", str(shell.root / "pages"), "--plugin", "nowhere")
    assert ran.code == 4
    assert "plugin 'nowhere' is not installed" in ran.err
    assert not (shell.root / "pages").exists()


def test_a_tree_without_plugins_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", str(tmp_path / "pages"), "--tree", str(tmp_path)]) == 2
    assert "no plugin project lies below" in capsys.readouterr().err
