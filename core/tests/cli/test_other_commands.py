"""``plugins``, ``config show``, ``doctor``, commands of plugins, and a light start."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry import __version__
from kvferry.api import API_VERSION
from kvferry.testing.fake_distributions import fake_distribution

from .conftest import CONFIG, CommandLine


def test_plugins_without_a_configuration_imports_nothing(shell: CommandLine) -> None:
    shell.install("acme-bad", "bad", "zoo_bad", "raise SystemExit('imported')\n")
    ran = shell.run("plugins")
    assert ran.code == 0
    core = f"kvferry {__version__}"
    assert (
        ran.out
        == f"""\
NAME          STATE  DISTRIBUTION              API       PROVIDES
core          ready  {core:<24}  >=1.0,<2  eviction lru
backend_tape  found  kvferry-backend-tape 1.0  -         -
bad           found  acme-bad 1.0              -         -

A plugin in state 'found' is installed and not listed; nothing of it was imported.
"""
    )


def test_plugins_of_a_configuration_with_reason_and_remedy(shell: CommandLine) -> None:
    shell.install("acme-bad", "bad", "zoo_bad", "raise SystemExit('no card')\n")
    file = shell.write(CONFIG.replace("]", ", bad, other]"))
    ran = shell.run("plugins", "--config", file)
    assert ran.code == 4
    lines = ran.out.splitlines()
    assert lines[2].split() == [
        *("backend_tape", "ready", "kvferry-backend-tape", "1.0", ">=1.0,<2"),
        *("backend", "tape,", "command", "rewind"),
    ]
    assert lines[3].split() == ["bad", "failed", "acme-bad", "1.0", "-", "-"]
    assert "SystemExit: no card" in lines[4]
    assert lines[5].startswith("  fix  ")
    assert lines[6].split() == ["other", "missing", "-", "-", "-"]
    assert lines[8] == "  fix  install the distribution that brings it, or correct the name"


def test_plugins_as_json(shell: CommandLine) -> None:
    shell.environment["KVFERRY_CONFIG"] = shell.write()
    rows = {row["name"]: row for row in shell.run("plugins", "--format", "json").json["plugins"]}
    assert rows["backend_tape"]["state"] == "ready"
    assert rows["backend_tape"]["distributions"] == [{"name": "kvferry-backend-tape", "version": "1.0"}]
    assert rows["backend_tape"]["api"] == ">=1.0,<2"
    assert {"kind": "backend", "name": "tape"} in rows["backend_tape"]["provides"]


def test_plugins_of_a_faulty_configuration_are_listed_and_the_fault_is_told(
    shell: CommandLine,
) -> None:
    ran = shell.run("plugins", "--config", shell.write("plugins: [backend_tape]\ntears: {}\n"))
    assert ran.code == 2
    assert "backend_tape  ready" in ran.out
    assert "c.yaml:2:1: tears: unknown key" in ran.err


def test_config_show_gives_every_value_its_origin(shell: CommandLine) -> None:
    shell.environment["KVFERRY__TIERS__CPU__REEL"] = "3"
    ran = shell.run("config", "show", shell.write())
    assert ran.code == 0
    rows = {line.split()[0]: line.split()[1:] for line in ran.out.splitlines()}
    assert rows["tiers.cpu.capacity"] == ["8GiB", "c.yaml:3:30"]
    assert rows["tiers.cpu.reel"] == ["3", "env", "KVFERRY__TIERS__CPU__REEL"]
    assert rows["chunk_tokens"] == ["256", "default"]


def test_config_show_takes_the_file_that_the_environment_names(shell: CommandLine) -> None:
    shell.environment["KVFERRY_CONFIG"] = shell.write()
    assert "tiers.cpu.capacity" in shell.run("config", "show").out
    other = shell.write(CONFIG.replace("8GiB", "9GiB"), "other.yaml")
    assert "9GiB" in shell.run("config", "show", other).out


def test_one_long_value_does_not_move_the_others(shell: CommandLine) -> None:
    ran = shell.run("config", "show", shell.write(CONFIG + f"model_identity: {'m' * 3000}\n"))
    lines = ran.out.splitlines()
    assert [len(line) > 200 for line in lines].count(True) == 1
    assert any(line.endswith(f"{'m' * 3000}  c.yaml:4:17") for line in lines)


def test_doctor_lists_what_only_the_engine_or_another_machine_knows(shell: CommandLine) -> None:
    shell.machine("proc/meminfo", "")
    ran = shell.run("doctor", "--format", "facts")
    assert ran.code == 0
    for path in ("host.memory_bytes", "engine.block_tokens", "engine.device"):
        assert f"\n# {path}: " in ran.out
    assert "not listed are: backend_tape.\n" in ran.out
    assert "not listed are" not in shell.run("doctor", "--format", "facts", "--config", shell.write()).out


def test_config_show_as_json_and_with_faults(shell: CommandLine) -> None:
    good = shell.run("config", "show", "--format", "json", shell.write())
    values = {".".join(row["path"]): row["value"] for row in good.json["values"]}
    assert values["tiers.cpu.capacity"] == "8GiB"
    assert good.json["faults"] == []
    bad = shell.run("config", "show", shell.write("tiers: {cpu: {use: tape}}\n"))
    assert bad.code == 2
    assert bad.out == ""
    assert "'capacity' is missing" in bad.err
    missing = shell.run("config", "show", shell.write("plugins: [nowhere]\n"))
    assert missing.code == 4
    assert "plugin 'nowhere' is not installed" in missing.err


def test_doctor_shows_facts_with_origins_and_plugins(shell: CommandLine) -> None:
    ran = shell.run("doctor", "--config", shell.write())
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == f"kvferry {__version__}, plugin API {API_VERSION}"
    assert lines[1].startswith(("copies are made by native code: ", "copies are made by NumPy: "))
    rows = [line.split("  ") for line in lines if line.startswith("host.")]
    shown = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert shown["host.memory_bytes"] == ["34359738368 (32 GiB)", "probe /proc/meminfo"]
    assert shown["host.huge_pages_shmem"][0] == "advise"
    assert "backend_tape  ready" in ran.out
    assert "tiers.cpu" not in ran.out
    assert "Plugins may know more facts" not in ran.out


def test_doctor_says_how_to_ask_plugins_that_nobody_listed(shell: CommandLine) -> None:
    assert shell.run("doctor").out.endswith(
        "Plugins may know more facts: 'kvferry doctor --config FILE' asks those that FILE lists.\n"
    )


DISKS = """
    from kvferry.api import Fact, FactKind, FactSource, FactSpec, Manifest, hookimpl

    MANIFEST = Manifest(name="disks", api=">=1.0,<2", rule_prefix="DISKS")
    SPEC = FactSpec(path="disks.names", kind=FactKind.TEXTS, meaning="disks", source=FactSource.HOST)

    @hookimpl
    def kvferry_fact_specs():
        return [SPEC]

    @hookimpl
    def kvferry_facts(env):
        return [Fact(path="disks.names", value=("large", "slow #2", "old"), origin="probe disks")]
"""


def test_a_list_takes_one_line_for_each_item(shell: CommandLine) -> None:
    shell.install("acme-disks", "disks", "zoo_disks", DISKS)
    file = shell.write("plugins: [disks]\n")
    lines = shell.run("doctor", "--config", file).out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("disks.names"))
    assert [line.split("  ", 1)[-1].strip().split("  ")[0] for line in lines[at : at + 3]] == [
        "large",
        "slow #2",
        "old",
    ]
    written = shell.run("doctor", "--config", file, "--format", "facts").out
    assert '  # disks\n  - "large"\n  - "slow #2"\n  - "old"\n' in written
    read = shell.run("check", "--facts", shell.write(written, "there.yaml"), file, "--format", "json").json
    assert read["facts_file"]["faults"] == read["facts_file"]["warnings"] == []


def test_doctor_as_json_and_with_a_broken_plugin(shell: CommandLine) -> None:
    file = shell.write("plugins: [nowhere]\n")
    ran = shell.run("doctor", "--config", file, "--format", "json")
    assert ran.code == 4
    facts = {fact["path"]: fact for fact in ran.json["facts"]}
    assert facts["host.memory_bytes"]["value"] == 32 << 30
    assert ran.json["copies"]["with"] in ("native code", "NumPy")
    assert ran.json["plugin_faults"][0]["what"] == "plugin 'nowhere' is not installed"
    assert "plugin 'nowhere' is not installed" in shell.run("doctor", "--config", file).out


def test_a_plugins_command_runs_when_the_plugin_is_named(shell: CommandLine) -> None:
    ran = shell.run("--plugin", "backend_tape", "rewind", "--turns", "3")
    assert (ran.code, ran.out) == (7, "rewound 3\n")
    assert shell.run("--plugin=backend_tape", "rewind").out == "rewound 1\n"


def test_a_plugins_command_runs_when_the_configuration_lists_the_plugin(
    shell: CommandLine,
) -> None:
    shell.environment["KVFERRY_CONFIG"] = shell.write()
    assert shell.run("rewind").code == 7


def test_a_plugins_command_is_not_offered_otherwise(shell: CommandLine) -> None:
    ran = shell.run("rewind")
    assert ran.code == 2
    assert "kvferry has no command 'rewind'" in ran.err
    assert "--plugin NAME" in ran.err
    assert "did you mean" not in ran.err
    assert "did you mean 'check'?" in shell.run("chek").err


def _offer_spool(shell: CommandLine, distribution: str, name: str, says: int) -> None:
    """A plugin whose metadata offers the command ``spool``, which returns ``says``."""
    package = f"zoo_{name}"
    fake_distribution(
        shell.site,
        distribution,
        entry_points={name: f"{package}.plugin"},
        offers={"command.spool": name},
        source={
            f"{package}/__init__.py": "",
            f"{package}/plugin.py": f"""
                from kvferry.api import CommandSpec, Manifest, hookimpl
                MANIFEST = Manifest(name="{name}", api=">=1.0,<2", rule_prefix="{name.upper()}")
                @hookimpl
                def kvferry_commands():
                    return [CommandSpec(name="spool", factory="{package}.parts:Spool", summary="spool it")]
            """,
            f"{package}/parts.py": f"""
                class Spool:
                    def configure(self, parser):
                        pass
                    def run(self, arguments):
                        return {says}
            """,
        },
        requires=["kvferry>=0.1"],
    )


def test_a_command_finds_the_installed_plugin_that_offers_it(shell: CommandLine) -> None:
    shell.install("acme-bad", "bad", "zoo_bad", "raise SystemExit('imported')\n")
    _offer_spool(shell, "acme-spools", "spools", 5)
    assert shell.run("spool").code == 5
    # Whatever a configuration lists beside it, and not for other commands.
    shell.environment["KVFERRY_CONFIG"] = shell.write()
    assert shell.run("spool").code == 5
    rows = {row["name"]: row for row in shell.run("plugins", "--format", "json").json["plugins"]}
    assert rows["spools"]["state"] == "found"


def test_of_several_plugins_that_offer_a_command_one_has_to_be_named(shell: CommandLine) -> None:
    _offer_spool(shell, "acme-spools", "spools", 5)
    _offer_spool(shell, "acme-reels", "reels", 6)
    ran = shell.run("spool")
    assert ran.code == 2
    assert "several installed plugins offer the command 'spool'" in ran.err
    assert "reels, spools" in ran.err
    assert shell.run("--plugin", "spools", "spool").code == 5
    assert shell.run("--plugin", "reels", "spool").code == 6


def test_an_offering_plugin_that_is_broken_says_so(shell: CommandLine) -> None:
    _offer_spool(shell, "acme-spools", "spools", 5)
    (shell.site / "zoo_spools/plugin.py").write_text("raise SystemExit('no card')\n")
    ran = shell.run("spool")
    assert ran.code == 4
    assert "plugin 'spools' failed" in ran.err


def test_a_named_plugin_that_is_broken_says_so(shell: CommandLine) -> None:
    ran = shell.run("--plugin", "nowhere", "rewind")
    assert ran.code == 4
    assert "plugin 'nowhere' is not installed" in ran.err


def test_a_plugin_cannot_take_the_place_of_a_built_in_command(shell: CommandLine) -> None:
    text = """
        from kvferry.api import CommandSpec, Manifest, hookimpl
        MANIFEST = Manifest(name="taker", api=">=1", rule_prefix="TAKE")
        @hookimpl
        def kvferry_commands():
            return [CommandSpec(name="check", factory="zoo_taker.parts:C", summary="mine")]
    """
    shell.install("acme-taker", "taker", "zoo_taker", text)
    ran = shell.run("--plugin", "taker", "check", shell.write())
    assert ran.code == 4
    assert "has the name of a built-in command" in ran.err


def test_help_lists_the_commands(shell: CommandLine, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        shell.run("--plugin", "backend_tape", "--help")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for name in ("plugins", "check", "config", "doctor", "rewind"):
        assert f"\n    {name} " in out


def test_no_command_shows_the_help_and_is_a_usage_error(shell: CommandLine) -> None:
    ran = shell.run()
    assert ran.code == 2
    assert "usage: kvferry" in ran.out


def test_version_is_quick_because_it_imports_little() -> None:
    code = (
        "import sys\n"
        "from kvferry.cli.main import main\n"
        "try:\n    main(['--version'])\n"
        "except SystemExit as ended:\n    assert ended.code == 0\n"
        "heavy = {'numpy', 'zmq', 'torch', 'vllm', 'redis', 'cattrs', 'yaml'} & set(sys.modules)\n"
        "print(sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, heavy = done.stdout.splitlines()
    assert version == f"kvferry {__version__} (plugin API {API_VERSION})"
    assert heavy == "[]"
