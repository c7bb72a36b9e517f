"""``kvferry check``: faults, plugins and rules in one report, and the exit codes."""

from __future__ import annotations

import pytest

from kvferry import __version__
from kvferry.api import Scope
from kvferry.compat import core_rules

from .conftest import CONFIG, CommandLine

# And the one of the plugin.
CHECKS = 1 + sum(rule.scope is Scope.INSTANCE for rule in core_rules())


def without_notices(text: str) -> str:
    """Drops what depends on whether this machine has the native library."""
    blocks = text.split("\n\n")
    return "\n\n".join(block for block in blocks if "CORE044" not in block)


def test_a_clean_file(shell: CommandLine) -> None:
    ran = shell.run("check", shell.write())
    assert ran.code == 0
    last = without_notices(ran.out).splitlines()[-1]
    assert last.startswith(f"c.yaml: {CHECKS} checks: ")
    assert "error" not in last
    assert ran.err == ""


def test_an_error(shell: CommandLine) -> None:
    ran = shell.run("check", shell.write(CONFIG.replace("8GiB", "40GiB")))
    assert ran.code == 2
    assert (
        f"""\
error[CORE042] one worker alone with 40 GiB in tiers and none for sharing needs more than the 32 GiB of \
memory that the machine has
  when     not (engine.workers is known)
  require  sum of tiers.*.capacity in memory and of sharing.*.host_bytes <= host.memory_bytes
  fact     tiers.cpu.capacity = 40GiB  <- c.yaml:3:30
  fact     host.memory_bytes = 34359738368 (32 GiB)  <- probe /proc/meminfo
  fix      lower the capacity, or check the file on the machine that it is meant for
  source   design  (core, kvferry {__version__}, since 0.1)

"""
        in ran.out
    )


def test_a_waived_error(shell: CommandLine) -> None:
    waived = CONFIG.replace("8GiB", "40GiB") + "waive: {CORE042: another machine}\n"
    ran = shell.run("check", shell.write(waived))
    assert ran.code == 0
    assert "waived error[CORE042] one worker alone" in ran.out
    assert "  waiver   another machine  <- c.yaml:4:18\n" in ran.out


def test_a_waiver_in_lower_case_keeps_its_place(shell: CommandLine) -> None:
    waived = CONFIG.replace("8GiB", "40GiB") + "waive: {core042: another machine}\n"
    ran = shell.run("check", shell.write(waived))
    assert ran.code == 0
    assert "another machine  <- c.yaml:4:18\n" in ran.out


def test_a_warning_counts_only_when_strict(shell: CommandLine) -> None:
    file = shell.write(CONFIG.replace("8GiB", "8GiB, reel: 12"))
    ran = shell.run("check", file)
    assert ran.code == 0
    assert (
        """\
warning[TAPE001] reel 12 is far away
  when     tiers.cpu.reel is known
  require  tiers.cpu.reel <= 9
  fact     tiers.cpu.reel = 12  <- c.yaml:3:42
  fix      use a reel up to 9
  source   design  (backend_tape, kvferry-backend-tape 1.0, since 0.1)
"""
        in ran.out
    )
    assert shell.run("check", "--strict", file).code == 1


def test_an_unverified_error(shell: CommandLine) -> None:
    shell.machine("proc/meminfo", "nothing to see\n")
    ran = shell.run("check", shell.write())
    assert ran.code == 3
    assert "error[CORE042] could not be verified" in ran.out
    assert "  missing  host.memory_bytes\n" in ran.out


def test_a_broken_plugin(shell: CommandLine) -> None:
    shell.install("acme-bad", "bad", "zoo_bad", "import zoo_missing_library\n")
    ran = shell.run("check", shell.write(CONFIG.replace("[", "[bad, ")))
    assert ran.code == 4
    assert ran.out.startswith("""\
error[plugin] c.yaml:1:11: plugin 'bad' failed
  why      acme-bad 1.0: importing 'zoo_bad.plugin' failed: it needs the module \
'zoo_missing_library', which is not installed
  fix      install what provides 'zoo_missing_library'

""")
    assert "c.yaml: 1 broken plugin; " in ran.out
    assert f"{CHECKS} checks: " in ran.out  # the others' rules judged all the same


def test_a_broken_plugin_may_be_skipped_on_request(shell: CommandLine) -> None:
    shell.install("acme-bad", "bad", "zoo_bad", "1 / 0\n")
    file = shell.write(CONFIG.replace("[", "[{name: bad, on_error: skip}, "))
    ran = shell.run("check", file)
    assert ran.code == 0
    assert "warning[plugin] c.yaml:1:11: plugin 'bad' failed\n" in ran.out
    assert shell.run("check", "--strict", file).code == 1


def test_a_missing_plugin(shell: CommandLine) -> None:
    ran = shell.run("check", shell.write(CONFIG.replace("backend_tape", "backend_tap")))
    assert ran.code == 4
    assert "error[plugin] c.yaml:1:11: plugin 'backend_tap' is not installed\n" in ran.out
    assert "did you mean 'backend_tape'?\n" in ran.out
    # The tier that wants it is told as well, and leads back to the cause.
    assert "there is no backend 'tape'" in ran.out
    assert "  fix      mend the plugins that are not usable first\n" in ran.out


@pytest.mark.parametrize("plugins", ["[{name: backend_tape, on_error: ignore}]", "backend_tape"])
def test_what_plugins_that_cannot_be_read_might_bring_is_not_missed(shell: CommandLine, plugins: str) -> None:
    text = CONFIG.replace("[backend_tape]", plugins) + "connector: {load: sync}\n"
    ran = shell.run("check", shell.write(text))
    assert ran.code == 2
    assert ran.out.count("error[") == 1
    assert "error[config] c.yaml:1:" in ran.out


def test_a_runtime_folder_that_is_none_is_refused(shell: CommandLine) -> None:
    ran = shell.run("check", shell.write(f"{CONFIG}runtime_dir: /taken/kv\n"))
    assert ran.code == 0, ran.out
    taken = shell.root / "machine/taken"
    taken.parent.mkdir(exist_ok=True)
    taken.touch()
    ran = shell.run("check", shell.write(f"{CONFIG}runtime_dir: /taken/kv\n"))
    assert ran.code == 2
    assert "runtime_dir: it cannot be a folder\n  why      " in ran.out
    assert "/taken is there already and is none\n" in ran.out


def test_faults_of_the_file_and_of_plugins_come_together(shell: CommandLine) -> None:
    text = "plugins: [nowhere]\nchunk_token: 1\ntiers: {cpu: {use: tape, capacity: 8}}\n"
    ran = shell.run("check", shell.write(text))
    assert ran.code == 4
    assert "error[config] c.yaml:2:1: chunk_token: unknown key" in ran.out
    assert "did you mean 'chunk_tokens'?" in ran.out
    assert "a size" in ran.out
    assert "plugin 'nowhere' is not installed" in ran.out
    assert ran.out.splitlines()[-1].endswith("rules were not applied, because the configuration has faults")


def test_an_unknown_key_of_a_plugins_section_is_found(shell: CommandLine) -> None:
    ran = shell.run("check", shell.write(CONFIG.replace("8GiB", "8GiB, real: 3")))
    assert ran.code == 2
    assert "tiers.cpu.real: unknown key" in ran.out
    assert "did you mean 'reel'?" in ran.out


def test_a_file_that_is_not_there(shell: CommandLine) -> None:
    ran = shell.run("check", str(shell.root / "absent.yaml"))
    assert ran.code == 2
    assert "error[config] absent.yaml: no such configuration file" in ran.out


def test_several_files_end_with_the_code_that_says_most(shell: CommandLine) -> None:
    good, bad = shell.write(), shell.write("tiers: {}\n", "bad.yaml")
    broken = shell.write("plugins: [nowhere]\n", "broken.yaml")
    ran = shell.run("check", good, bad)
    assert ran.code == 2
    assert "c.yaml: " in ran.out
    assert "bad.yaml: " in ran.out
    assert "  fact     tiers = {}  <- bad.yaml:1:8\n" in ran.out
    assert shell.run("check", good, broken, bad).code == 4


def test_the_environment_counts_as_at_an_engines_start(shell: CommandLine) -> None:
    shell.environment["KVFERRY__TIERS__CPU__CAPACITY"] = "40GiB"
    ran = shell.run("check", shell.write())
    assert ran.code == 2
    assert "tiers.cpu.capacity = 40GiB  <- env KVFERRY__TIERS__CPU__CAPACITY\n" in ran.out
    assert "  fix      change or unset KVFERRY__TIERS__CPU__CAPACITY, or else: lower the capacity" in ran.out


def test_standard_input_is_a_file_too(shell: CommandLine) -> None:
    shell.piped = b"plugins: [backend_tape]\ntears: 1\n"
    ran = shell.run("check", "-")
    assert ran.code == 2
    assert "error[config] <stdin>:2:1: tears: unknown key\n" in ran.out
    twice = shell.run("check", "-", shell.write(), "-")
    assert twice.out.count("<stdin>:2:1: tears: unknown key\n") == 2
    shell.piped = b""
    assert "<stdin>:1:1: the file is empty" in shell.run("check", "-").out


def test_words_and_options_come_in_any_order(shell: CommandLine) -> None:
    a, b = shell.write(name="a.yaml"), shell.write(name="b.yaml")
    ran = shell.run("check", a, "--strict", b, "--format", "json")
    assert [file["name"] for file in ran.json["files"]] == ["a.yaml", "b.yaml"]
    with pytest.raises(SystemExit):
        shell.run("check", a, "--strikt", b)


def test_a_misspelt_waiver_is_told_beside_the_faults_of_the_file(shell: CommandLine) -> None:
    waivers = "waive: {CORE99: old, CORE041: known, TAPE01: misspelt}\n"
    ran = shell.run("check", shell.write(CONFIG + "tears: 1\n" + waivers))
    assert ran.code == 2
    assert "tears: unknown key" in ran.out
    assert "warning: the waiver of CORE99 names a rule that no loaded plugin owns\n" in ran.out
    assert "did you mean 'TAPE001'?" in ran.out
    assert "waiver of CORE041" not in ran.out
    assert "c.yaml: 1 configuration fault; 2 waivers of no rule; rules were not applied" in ran.out
    # What a plugin that cannot be used would own is not known.
    missing = shell.run("check", shell.write(CONFIG.replace("]", ", nowhere]") + "tears: 1\n" + waivers))
    assert "waiver of" not in missing.out


def test_a_file_with_plugins_and_no_connector_gets_a_note(shell: CommandLine) -> None:
    ran = shell.run("check", "--strict", shell.write())
    assert "note[CORE025] no listed plugin connects an engine (listed: backend_tape)" in ran.out
    assert "CORE025" not in shell.run("check", shell.write("tiers: {}\n")).out
    # One of the plugins that cannot be used may be the connector.
    assert "CORE025" not in shell.run("check", shell.write(CONFIG.replace("]", ", nowhere]"))).out


def test_a_second_tier_in_memory_is_told_at_its_place(shell: CommandLine) -> None:
    more = CONFIG + "  cpu2: {use: tape, capacity: 1GiB}\n"
    ran = shell.run("check", shell.write(more))
    assert ran.code == 2
    assert "error[CORE005] the backend tape gives plain memory, and every tier behind the first" in ran.out
    assert "fact     tiers.cpu2.use = tape  <- " in ran.out
    assert "CORE003" not in ran.out


def test_json_says_the_same(shell: CommandLine) -> None:
    file = shell.write(CONFIG.replace("8GiB", "40GiB"))
    ran = shell.run("check", "--format", "json", file)
    assert ran.code == ran.json["exit_code"] == 2
    (only,) = ran.json["files"]
    violated = [f for f in only["rules"]["findings"] if f["outcome"] == "violated"]
    assert "CORE042" in {finding["id"] for finding in violated}
    assert {f["outcome"] for f in only["rules"]["findings"]} >= {"ok", "not-applicable"}
    missing = shell.run("check", "--format", "json", shell.write("plugins: [nowhere]\ntears: {}\n"))
    (only,) = missing.json["files"]
    assert only["exit_code"] == 4
    assert only["rules"] is None
    assert only["plugin_faults"][0]["fix"] == "install the distribution that brings it, or correct the name"
    assert only["config_faults"][0]["where"].endswith("c.yaml:2:1")


@pytest.mark.parametrize("words", [["check"], ["check", "--format", "xml", "f"], ["--nothing"]])
def test_bad_arguments_end_with_2(shell: CommandLine, words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        shell.run(*words)
    assert ended.value.code == 2
