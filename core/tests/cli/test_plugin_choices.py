"""What the configuration chose of the plugins it lists: judged at its place, before anything is built."""

from __future__ import annotations

import pytest

from kvferry.api import HostEnvironment
from kvferry.config import ConfigSources
from kvferry.runtime.startup import examine
from kvferry.testing.fake_distributions import distributions_in, fake_distribution, importable

from .conftest import CONFIG, PARTS, TAPE, CommandLine

CONNECTOR = """
    from kvferry.api import ConnectorSpec, Manifest, hookimpl
    MANIFEST = Manifest(name="connector_one", api=">=1", rule_prefix="ONE")
    @hookimpl
    def kvferry_connectors():
        return [ConnectorSpec(name="one", options="zoo_one.parts:Options")]
"""
OPTIONS = "from attrs import frozen\n@frozen\nclass Options:\n    load: str = 'async'\n"
KEYS = "connector: {load: sync, verify: true}\n"
LISTED = CONFIG.replace("]", ", connector_one]")
ROADS = """
    from kvferry.api import ChannelSpec, LookupSpec, Manifest, StagingSpec, hookimpl
    MANIFEST = Manifest(name="roads", api=">=1", rule_prefix="ROAD")
    @hookimpl
    def kvferry_channels():
        return [ChannelSpec(name="road", factory="zoo_roads.parts:Road", options="zoo_roads.parts:Lanes")]
    @hookimpl
    def kvferry_lookups():
        return [LookupSpec(name="map", factory="zoo_roads.parts:Map", options="zoo_roads.parts:Sheet")]
    @hookimpl
    def kvferry_stagings():
        return [StagingSpec(name="yard", factory="zoo_roads.parts:Yard", options="zoo_roads.parts:Gates")]
"""
ROAD_PARTS = """
    from attrs import frozen
    class Road:
        def __init__(self, options): ...
        def open(self, context): ...
        def register(self, region): ...
        def deregister(self, name): ...
        def export(self): ...
        def connect(self, peer, deadline): ...
        def read(self, connection, operations, deadline): ...
        def write(self, connection, operations, deadline): ...
        def close(self, deadline): ...
    class Map:
        def __init__(self, options): ...
    class Yard:
        def __init__(self, options, capacity): ...
        def open(self, context): ...
        def stage(self, copies, deadline): ...
        def close(self, deadline): ...
    @frozen
    class Lanes:
        lanes: int = 4
    @frozen
    class Sheet:
        url: str
    @frozen
    class Gates:
        gates: int = 2
"""
SHARING = """\
channel: {use: road, lanes: 8}
lookup: {use: map, url: tcp://10.0.0.1:9900}
staging: {use: yard, capacity: 2GiB, gates: 3}
"""


def install_roads(shell: CommandLine, parts: str = ROAD_PARTS, plugin: str = ROADS) -> None:
    """Plugin ``roads`` with a channel ``road``, a directory ``map`` and a staging ``yard``, which it
    announces."""
    fake_distribution(
        shell.site,
        "acme-roads",
        entry_points={"roads": "zoo_roads.plugin"},
        source={"zoo_roads/__init__.py": "", "zoo_roads/plugin.py": plugin, "zoo_roads/parts.py": parts},
        offers={"channel.road": "roads", "lookup.map": "roads", "staging.yard": "roads"},
    )


def test_keys_of_a_connector_whose_plugin_is_missing_are_not_called_unknown(shell: CommandLine) -> None:
    ran = shell.run("check", shell.write(LISTED + KEYS))
    assert ran.code == 4
    assert "plugin 'connector_one' is not installed" in ran.out
    assert "unknown key" not in ran.out
    assert ran.out.count("error[") == 1


def test_keys_of_a_connector_whose_plugin_is_skipped_do_no_harm(shell: CommandLine) -> None:
    listed = CONFIG.replace("]", ", {name: connector_one, on_error: skip}]")
    ran = shell.run("check", shell.write(listed + KEYS))
    assert ran.code == 0
    assert "warning[plugin] c.yaml:1:" in ran.out


def test_keys_of_a_connector_that_nobody_lists_are_one_clear_fault(shell: CommandLine) -> None:
    ran = shell.run("check", shell.write(CONFIG + KEYS))
    assert ran.code == 2
    assert (
        "error[config] c.yaml:4:12: connector: these keys belong to a connector, and no listed plugin "
        "provides one: load, verify\n"
        "  fix      list the connector's plugin under plugins, or remove the keys\n" in ran.out
    )
    assert "unknown key" not in ran.out


def test_a_connector_section_without_keys_needs_no_connector(shell: CommandLine) -> None:
    assert shell.run("check", shell.write(CONFIG + "connector: {}\n")).code == 0


def test_keys_of_a_connector_that_is_there_are_judged(shell: CommandLine) -> None:
    shell.install("acme-one", "connector_one", "zoo_one", CONNECTOR, OPTIONS)
    ran = shell.run("check", shell.write(LISTED + "connector: {lod: sync}\n"))
    assert ran.code == 2
    assert "connector.lod: unknown key\n  fix      did you mean 'load'?" in ran.out


def install_unfit(shell: CommandLine) -> None:
    """Plugin ``bad`` with a backend ``bad`` that cannot be closed."""
    plugin = TAPE.replace("backend_tape", "bad").replace("TAPE", "BAD").replace("rewind", "wind")
    plugin = plugin.replace('name="tape"', 'name="bad"').replace("zoo_tape", "zoo_bad")
    shell.install("acme-bad", "bad", "zoo_bad", plugin, PARTS.replace("def close(self):", "def shut(self):"))


@pytest.mark.parametrize("command", ["check", "doctor"])
def test_an_implementation_that_does_not_fit_is_told_where_it_was_chosen(
    shell: CommandLine, command: str
) -> None:
    install_unfit(shell)
    text = "plugins: [backend_tape, bad]\ntiers:\n"
    file = shell.write(
        text + "  one: {use: tape, capacity: 1GiB}\n  two: {use: bad, capacity: 1GiB, reel: x}\n"
        "  six: {use: bad, capacity: 1GiB}\n"
    )
    shell.environment["KVFERRY_CONFIG"] = file
    ran = shell.run(command, *([file] if command == "check" else []))
    assert ran.code == 4
    # Once, though two tiers chose it, and beside what is wrong with their keys.
    said = "error[plugin] c.yaml:4:14: backend 'bad' of plugin 'bad' (acme-bad 1.0) does not fit the contract"
    assert ran.out.count("does not fit the contract") == 1
    assert said in ran.out
    assert "zoo_bad.parts.Backend has no method close()" in ran.out
    assert "c.yaml:4:41: tiers.two.reel: expected a whole number" in ran.out


def test_showing_a_configuration_imports_no_implementation(shell: CommandLine) -> None:
    install_unfit(shell)
    file = shell.write("plugins: [bad]\ntiers: {two: {use: bad, capacity: 1GiB}}\n")
    assert shell.run("config", "show", file).code == 0
    assert shell.run("check", file).code == 4


def test_one_missing_module_behind_options_and_implementation_is_told_once(shell: CommandLine) -> None:
    plugin = TAPE.replace("backend_tape", "bad").replace("zoo_tape.parts", "zoo_nowhere.parts")
    shell.install("acme-bad", "bad", "zoo_bad", plugin)
    file = shell.write("plugins: [bad]\ntiers: {one: {use: tape, capacity: 1GiB}}\n")
    ran = shell.run("check", file)
    assert ran.code == 4
    assert ran.out.count("there is no module 'zoo_nowhere.parts'") == 1


def test_a_channel_a_directory_and_a_staging_whose_plugin_is_not_listed_name_the_plugin(
    shell: CommandLine,
) -> None:
    install_roads(shell)
    ran = shell.run("check", shell.write(CONFIG + SHARING))
    assert ran.code == 2
    listed = "'roads' is installed and not listed: add it under plugins\n"
    chosen = (("4:16", "channel", "road"), ("5:15", "lookup", "map"), ("6:16", "staging", "yard"))
    for place, kind, name in chosen:
        said = f"error[config] c.yaml:{place}: {kind}.use: there is no {kind} {name!r}\n"
        assert f"{said}  why      the listed plugins provide: none\n  fix      {listed}" in ran.out
    # Whose keys stand beside it is not known, so nothing is said about them.
    assert "3 configuration faults" in ran.out


def test_a_channel_a_directory_and_a_staging_that_are_chosen_are_fit_and_shown(shell: CommandLine) -> None:
    install_roads(shell)
    file = shell.write(CONFIG.replace("]", ", roads]") + SHARING)
    assert shell.run("check", file).code == 0
    shown = {line.split()[0]: line.split()[1:] for line in shell.run("config", "show", file).out.splitlines()}
    assert shown["channel.lanes"] == ["8", "c.yaml:4:29"]
    assert shown["lookup.url"] == ["tcp://10.0.0.1:9900", "c.yaml:5:25"]
    assert shown["staging.gates"] == ["3", "c.yaml:6:45"]


def test_what_a_channel_claims_rules_can_read(shell: CommandLine) -> None:
    plugin = ROADS.replace(
        'options="zoo_roads.parts:Lanes")', 'options="zoo_roads.parts:Lanes", capabilities=LIMITED)'
    )
    plugin = plugin.replace("ChannelSpec,", "ChannelCapabilities, ChannelSpec, MemoryKind,", 1).replace(
        "    @hookimpl\n    def kvferry_channels",
        "    LIMITED = ChannelCapabilities(max_registered_bytes=1 << 30, staging=False,\n"
        "        memory=frozenset((MemoryKind.HOST, MemoryKind.DEVICE)))\n"
        "    @hookimpl\n    def kvferry_channels",
        1,
    )
    install_roads(shell, plugin=plugin)
    file = shell.write(CONFIG.replace("]", ", roads]") + SHARING)
    sources = ConfigSources(file=shell.root / file, environment={}, overrides={})
    with importable(shell.site):
        found = examine(sources, HostEnvironment(), distributions=lambda: distributions_in(shell.site))
    claims = {
        path.removeprefix("channel.capabilities."): fact
        for path, fact in found.facts.items()
        if path.startswith("channel.capabilities.")
    }
    assert claims["max_registered_bytes"].value == 1 << 30
    assert claims["staging"].value is False
    assert claims["memory"].value == ("device", "host")
    assert {fact.origin for fact in claims.values()} == {"plugin roads"}


def test_without_a_channel_nothing_is_claimed(shell: CommandLine) -> None:
    sources = ConfigSources(file=shell.root / shell.write(CONFIG), environment={}, overrides={})
    with importable(shell.site):
        found = examine(sources, HostEnvironment(), distributions=lambda: distributions_in(shell.site))
    assert not [path for path in found.facts if path.startswith("channel.capabilities")]


def test_a_channel_that_does_not_fit_is_told_where_it_was_chosen(shell: CommandLine) -> None:
    install_roads(shell, ROAD_PARTS.replace("def deregister(self, name)", "def forget(self, name)"))
    ran = shell.run("check", shell.write(CONFIG.replace("]", ", roads]") + SHARING))
    assert ran.code == 4
    assert (
        "c.yaml:4:16: channel 'road' of plugin 'roads' (acme-roads 1.0) does not fit the contract" in ran.out
    )
    assert "zoo_roads.parts.Road has no method deregister(name)" in ran.out


def test_a_channel_that_nobody_chose_is_neither_imported_nor_judged(shell: CommandLine) -> None:
    install_roads(shell, "raise AssertionError('imported')\n")
    ran = shell.run("check", shell.write(CONFIG.replace("]", ", roads]")))
    assert ran.code == 0
