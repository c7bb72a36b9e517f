"""An engine's start: the same judgement and the same text as ``kvferry check``."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvferry.api import ErrorKind, Fact, HostEnvironment, KVFerryError, Retry
from kvferry.compat import ExitCode
from kvferry.config import Config, ConfigSources
from kvferry.runtime.startup import EngineFacts, Prepared, no_engine, prepare
from kvferry.testing.fake_distributions import distributions_in, importable

from .conftest import CONFIG, CommandLine

ENGINE: dict[str, object] = {
    "engine.block_tokens": 16,
    "engine.workers": 2,
    "engine.device": "cpu",
    "engine.group_kinds": ("full",),
}


def engine(**changes: object) -> EngineFacts:
    values = ENGINE | {f"engine.{name}": value for name, value in changes.items()}

    def facts(config: Config) -> Iterable[Fact]:
        shown = {**values, "engine.chunk_bytes": config.chunk_tokens * 1024}
        return [Fact(path=path, value=value, origin="engine") for path, value in shown.items()]

    return facts


def start(shell: CommandLine, text: str = CONFIG, engine_facts: EngineFacts = no_engine) -> Prepared:
    sources = ConfigSources(file=Path(shell.write(text)), environment={}, overrides={})
    environment = HostEnvironment(root=str(shell.root / "machine"))
    with importable(shell.site):
        return prepare(
            sources,
            environment,
            engine_facts,
            distributions=lambda: distributions_in(shell.site),
        )


def test_a_fit_configuration_starts(shell: CommandLine) -> None:
    prepared = start(shell, engine_facts=engine())
    assert prepared.config.tiers
    assert prepared.plugins.backend("tape").capabilities.addressable
    facts = prepared.examination.facts
    assert facts["tiers.cpu.capabilities.addressable"].origin == "plugin backend_tape"
    assert facts["engine.chunk_bytes"].value == 256 * 1024


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("tiers: {}\n", ErrorKind.COMPATIBILITY),
        (CONFIG + "tears: {}\n", ErrorKind.CONFIG),
        (CONFIG.replace("[", "[nowhere, "), ErrorKind.PLUGIN),
        (CONFIG.replace("backend_tape", "nowhere"), ErrorKind.PLUGIN),
    ],
)
def test_a_refused_start_says_what_the_check_says(shell: CommandLine, text: str, kind: ErrorKind) -> None:
    with pytest.raises(KVFerryError) as refused:
        start(shell, text)
    said = str(refused.value).replace(f"{shell.root}/", "")
    checked = shell.run("check", shell.write(text))
    assert checked.code != 0
    assert said.endswith(checked.out.rstrip("\n"))
    assert refused.value.kind is kind
    assert refused.value.retry is Retry.AFTER_CHANGE
    # Engines carry the error from a worker to their parent.
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_every_process_says_the_same(shell: CommandLine) -> None:
    texts = []
    for _ in range(2):
        with pytest.raises(KVFerryError) as refused:
            start(shell, engine_facts=engine(device="npu", workers=9))
        texts.append(str(refused.value))
    assert texts[0] == texts[1]
    assert "error[CORE023] the engine keeps its KV cache on device npu" in texts[0]
    assert "error[CORE040] 9 workers with 8 GiB each in tiers and none for sharing need more" in texts[0]


def test_an_unverified_error_stops_the_start_until_it_is_waived(shell: CommandLine) -> None:
    def silent(config: Config) -> Iterable[Fact]:
        return [fact for fact in engine()(config) if fact.path != "engine.device"]

    with pytest.raises(KVFerryError, match="could not be verified") as refused:
        start(shell, engine_facts=silent)
    assert "missing  engine.device" in str(refused.value)
    waived = CONFIG + "waive: {CORE023: host memory for sure}\n"
    assert start(shell, waived, silent).examination.exit_code() is ExitCode.CLEAN


def test_warnings_start_and_are_there_to_be_logged(shell: CommandLine) -> None:
    prepared = start(shell, CONFIG.replace("8GiB", "8GiB, reel: 12"), engine())
    assert "warning[TAPE001] reel 12 is far away" in prepared.examination.notices()


def test_a_connector_section_without_use_belongs_to_the_host(shell: CommandLine) -> None:
    text = """
        from kvferry.api import ConnectorSpec, Manifest, hookimpl
        MANIFEST = Manifest(name="{0}", api=">=1", rule_prefix="{1}")
        @hookimpl
        def kvferry_connectors():
            return [ConnectorSpec(name="{2}", options="zoo_{2}.parts:Options")]
    """
    parts = "from attrs import frozen\n@frozen\nclass Options:\n    {0}: int = 0\n"
    for name, key in (("one", "left"), ("two", "right")):
        plugin = text.format(f"connector_{name}", name.upper(), name)
        shell.install(f"acme-{name}", f"connector_{name}", f"zoo_{name}", plugin, parts.format(key))
    listed = CONFIG.replace("]", ", connector_one]")
    prepared = start(shell, listed + "connector: {left: 3}\n")
    assert prepared.examination.facts["connector.left"].value == 3
    both = CONFIG.replace("]", ", connector_one, connector_two]") + "connector: {right: 3}\n"
    with pytest.raises(KVFerryError, match=r"set connector\.use to one of: one, two"):
        start(shell, both)
    sources = ConfigSources(file=Path(shell.write(both)), environment={}, overrides={})
    with importable(shell.site):
        chosen = prepare(
            sources,
            HostEnvironment(root=str(shell.root / "machine")),
            connector="two",
            distributions=lambda: distributions_in(shell.site),
        )
    assert chosen.examination.facts["connector.right"].value == 3
