"""``kvferry check`` of several files, and for another host; ``kvferry doctor --format facts``."""

from __future__ import annotations

import json
import re

import pytest

from kvferry.compat import core_rules

from .conftest import CONFIG, CommandLine

THERE = """\
host.memory_bytes: 64GiB
host.huge_pages_shmem: advise
native.available: true
native.why: installed
"""


def named(instance: str, capacity: str = "8GiB", more: str = "") -> str:
    return CONFIG.replace("8GiB", capacity) + f"instance: {instance}\n{more}"


def test_neighbours_are_judged_one_by_one_and_together(shell: CommandLine) -> None:
    there = shell.write(THERE, "there.yaml")
    a, b = shell.write(named("x", "30GiB"), "a.yaml"), shell.write(named("x", "40GiB"), "b.yaml")
    ran = shell.run("check", "--facts", there, a, b)
    assert ran.code == 2
    parts = ran.out.split("\n\n")
    heads = [part.splitlines()[0].split(":")[0] for part in parts]
    assert heads[:2] == ["a.yaml", "b.yaml"]
    assert "error[CORE060] a.yaml, b.yaml" in heads
    text = ran.out
    assert "  fact     instances.a.instance = x  <- a.yaml:4:11\n" in text
    assert "  fact     instances.b.instance = x  <- b.yaml:4:11\n" in text
    assert "error[CORE066] a.yaml, b.yaml: with one worker each, the instances need 30 GiB, 40 GiB" in text
    assert "  fact     host.memory_bytes = 68719476736 (64 GiB)  <- there.yaml:1:20\n" in text
    assert "not judged: CORE067 a.yaml, b.yaml, because CORE066 is violated" in text


def test_files_that_go_together_are_clean(shell: CommandLine) -> None:
    there = shell.write(THERE, "there.yaml")
    a, b = shell.write(named("x"), "a.yaml"), shell.write(named("y"), "b.yaml")
    ran = shell.run("check", "--facts", there, "--strict", a, b)
    assert ran.code == 0
    assert "together, a.yaml, b.yaml: " in ran.out


def test_one_file_twice_is_two_instances(shell: CommandLine) -> None:
    file = shell.write(named("x"))
    ran = shell.run("check", file, file)
    assert ran.code == 2
    assert "error[CORE060] c.yaml, c.yaml (2): both instances are called x" in ran.out


def test_a_file_with_faults_is_left_out_and_the_others_are_still_compared(shell: CommandLine) -> None:
    a, b = shell.write(named("x"), "a.yaml"), shell.write(named("x"), "b.yaml")
    bad = shell.write("tears: {}\n", "bad.yaml")
    ran = shell.run("check", a, bad, b)
    assert ran.code == 2
    assert "error[CORE060] a.yaml, b.yaml: both" in ran.out
    assert "together, a.yaml, b.yaml (without bad.yaml): " in ran.out
    alone = shell.run("check", a, bad)
    assert "together, a.yaml (without bad.yaml): not judged; fewer than two could be" in alone.out
    assert alone.code == 2


def test_a_waiver_in_one_of_the_files_lifts_what_is_about_both(shell: CommandLine) -> None:
    a = shell.write(named("x", more="waive: {CORE060: one of them is off}\n"), "a.yaml")
    b = shell.write(named("x"), "b.yaml")
    ran = shell.run("check", a, b)
    assert ran.code == 0
    assert "waived error[CORE060] a.yaml, b.yaml: both instances" in ran.out
    assert "  waiver   one of them is off  <- a.yaml:5:18\n" in ran.out
    assert "CORE060" not in shell.run("check", a).out


def test_json_of_several_files_has_a_stable_shape(shell: CommandLine) -> None:
    there = shell.write(THERE + "host.memory: 3GiB\n", "there.yaml")
    a, b = shell.write(named("x"), "a.yaml"), shell.write(named("x"), "b.yaml")
    ran = shell.run("check", "--format", "json", "--facts", there, a, b)
    data = ran.json
    assert set(data) == {"schema", "exit_code", "facts_file", "ignored_variables", "files", "together"}
    assert (data["schema"], data["exit_code"], ran.code) == (1, 2, 2)
    assert set(data["facts_file"]) == {"name", "faults", "warnings", "not_given"}
    assert data["facts_file"]["warnings"][0]["where"].endswith("there.yaml:5:1")
    assert {"path", "meaning"} == set(data["facts_file"]["not_given"][0])
    for file in data["files"]:
        assert set(file) == {
            *("name", "exit_code", "summary", "config_faults", "plugin_faults", "skipped_plugins", "rules"),
            "unknown_waivers",
        }
        assert set(file["rules"]) == {"summary", "findings", "waivers"}
    assert set(data["together"]) == {"left_out", "summary", "findings", "waivers"}
    clash = next(each for each in data["together"]["findings"] if each["id"] == "CORE060")
    assert set(clash) == {
        *("id", "severity", "outcome", "scope", "instances", "member", "message", "when", "require"),
        *("facts", "missing", "not_judged", "broken", "waiver", "fix", "source", "owner", "distribution"),
        "since",
    }
    assert [name.rpartition("/")[2] for name in clash["instances"]] == ["a.yaml", "b.yaml"]
    assert [set(fact) for fact in clash["facts"]] == [{"path", "value", "origin"}] * 2
    alone = shell.run("check", "--format", "json", a).json
    assert (alone["facts_file"], alone["together"]) == (None, None)


def test_nothing_of_this_host_counts_for_another(shell: CommandLine) -> None:
    # This machine is too small by far and says never; none of it may show.
    shell.machine("proc/meminfo", "MemTotal: 1024 kB\nMemAvailable: 1024 kB\n")
    shell.machine("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [never]\n")
    file = shell.write()
    assert shell.run("check", file).code == 2
    ran = shell.run("check", "--strict", "--facts", shell.write(THERE, "there.yaml"), file)
    assert ran.code == 0
    data = shell.run("check", "--format", "json", "--facts", shell.write(THERE, "there.yaml"), file).json
    origins = {
        fact["origin"] for finding in data["files"][0]["rules"]["findings"] for fact in finding["facts"]
    }
    assert not [origin for origin in origins if origin.startswith("probe")]


def test_variables_of_this_shell_do_not_count_for_another_host(shell: CommandLine) -> None:
    shell.environment["KVFERRY__TIERS__CPU__CAPACITY"] = "70GiB"
    there, file = shell.write(THERE, "there.yaml"), shell.write()
    words = ("check", "--facts", there, file)
    ran = shell.run(*words)
    assert ran.code == 0
    assert "note: KVFERRY__TIERS__CPU__CAPACITY is set here and does not count" in ran.out
    assert "--with-environment" in ran.out
    told = shell.run(*words, "--format", "json").json
    assert told["ignored_variables"] == ["KVFERRY__TIERS__CPU__CAPACITY"]
    counted = shell.run(*words, "--with-environment")
    assert counted.code == 2
    assert "tiers.cpu.capacity = 70GiB  <- env KVFERRY__TIERS__CPU__CAPACITY" in counted.out
    assert "does not count" not in counted.out
    assert "does not count" not in shell.run("check", file).out


def test_what_is_alike_about_all_files_is_told_once_and_notes_come_last(shell: CommandLine) -> None:
    there = shell.write(THERE.replace("advise", "never"), "there.yaml")
    a, b = shell.write(named("x"), "a.yaml"), shell.write(named("x"), "b.yaml")
    ran = shell.run("check", "--facts", there, a, b)
    heads = [part.split(maxsplit=1)[0] for part in ran.out.split("\n\n")]
    assert heads.count("note[CORE045]") == 1
    assert "note[CORE045] a.yaml, b.yaml: the system gives no huge pages" in ran.out
    assert heads.index("error[CORE060]") < heads.index("note[CORE045]")
    # Each count still says what was found about its file.
    assert ran.out.count(" 2 notes, ") == 2
    alone = shell.run("check", "--facts", there, a)
    assert "note[CORE045] the system gives no huge pages" in alone.out


def test_files_of_one_name_are_told_apart(shell: CommandLine) -> None:
    there = shell.write(THERE, "there.yaml")
    a, b = shell.write(named("x"), "one/kv.yaml"), shell.write(named("x"), "two/kv.yaml")
    ran = shell.run("check", "--facts", there, a, b)
    assert re.search(r"instances\.\w*one_kv\.instance = x  <- one/kv.yaml", ran.out)
    assert re.search(r"instances\.\w*two_kv\.instance = x  <- two/kv.yaml", ran.out)
    shell.write(named("y", "60GiB"), "two/kv.yaml")
    ran = shell.run("check", "--facts", there, a, b)
    assert "instances.x.tiers.cpu.capacity = 8GiB" in ran.out
    assert "instances.y.tiers.cpu.capacity = 60GiB" in ran.out


def test_what_the_file_does_not_give_is_unverified_where_it_decides_and_listed(shell: CommandLine) -> None:
    there = shell.write("host.cpus: 4\n", "there.yaml")
    ran = shell.run("check", "--facts", there, shell.write())
    assert ran.code == 3
    assert "error[CORE042] could not be verified" in ran.out
    note = ran.out.split("\n\n")[-1].splitlines()
    assert note[0] == "note: there.yaml does not give these facts, which rules read"
    missing = {line.split()[1] for line in note[1:]}
    assert {"host.memory_bytes", "engine.workers", "native.available"} <= missing
    given = shell.run("check", "--facts", shell.write(THERE, "there.yaml"), shell.write())
    note = given.out.split("\n\n")[-1]
    assert "engine.workers" in note
    assert "host.memory_bytes" not in note


def test_facts_of_an_engine_make_its_rules_speak(shell: CommandLine) -> None:
    engine = "engine: {workers: 9, block_tokens: 96, chunk_bytes: 4MiB, device: npu, group_kinds: [full]}\n"
    ran = shell.run("check", "--facts", shell.write(THERE + engine, "there.yaml"), shell.write())
    assert ran.code == 2
    for rule_id in ("CORE020", "CORE023", "CORE040"):
        assert f"error[{rule_id}]" in ran.out
    assert "engine.block_tokens = 96  <- there.yaml:5:36\n" in ran.out


def test_a_facts_file_with_faults_judges_nothing(shell: CommandLine) -> None:
    there = shell.write("host.memory_bytes: 64\nengine.workers: many\n", "there.yaml")
    a, b = shell.write(named("x"), "a.yaml"), shell.write(named("x"), "b.yaml")
    ran = shell.run("check", "--facts", there, a, b)
    assert ran.code == 2
    assert ran.out.startswith("error[facts] there.yaml:1:20: host.memory_bytes: expected a size")
    assert "error[facts] there.yaml:2:17: engine.workers: expected a whole number" in ran.out
    assert "a.yaml: rules were not applied, because the facts file has faults" in ran.out
    assert "CORE" not in ran.out


def test_an_unknown_fact_counts_only_when_strict(shell: CommandLine) -> None:
    there = shell.write(THERE + "host.memory: 3GiB\n", "there.yaml")
    file = shell.write()
    ran = shell.run("check", "--facts", there, file)
    assert ran.code == 0
    assert "warning[facts] there.yaml:5:1: host.memory: no loaded plugin knows this fact" in ran.out
    assert "did you mean 'host.memory_bytes'?" in ran.out
    assert shell.run("check", "--strict", "--facts", there, file).code == 1


def test_what_doctor_writes_judges_elsewhere_as_here(shell: CommandLine) -> None:
    config = shell.write()
    written = shell.run("doctor", "--format", "facts", "--config", config)
    assert written.code == 0
    assert "host.memory_bytes: 32GiB " in written.out
    assert "# engine.workers: " in written.out
    here = shell.run("check", "--format", "json", config).json
    # The other machine is empty.
    shell.machine("proc/meminfo", "")
    there = shell.write(written.out, "there.yaml")
    data = shell.run("check", "--format", "json", "--facts", there, config).json
    assert data["facts_file"]["faults"] == data["facts_file"]["warnings"] == []

    def outcomes(judged: dict[str, object]) -> str:
        (only,) = judged["files"]  # type: ignore[misc]
        return json.dumps([(each["id"], each["outcome"]) for each in only["rules"]["findings"]])

    assert outcomes(data) == outcomes(here)


@pytest.mark.parametrize("rule_id", ["CORE001", "CORE003", "CORE020"])
def test_what_could_not_run_at_all_cannot_be_waived(rule_id: str) -> None:
    (rule,) = (rule for rule in core_rules() if rule.id == rule_id)
    assert not rule.waivable


def test_a_waiver_of_what_cannot_be_waived_is_told(shell: CommandLine) -> None:
    ran = shell.run("check", shell.write("tiers: {}\nwaive: {CORE001: no need}\n"))
    assert ran.code == 2
    assert "error[CORE001] no tier is configured" in ran.out
    assert "warning: the waiver of CORE001 lifts nothing: this rule cannot be waived" in ran.out


@pytest.mark.parametrize(
    ("waive", "place", "fault"),
    [
        ("{CORE001: ''}", "2:18", "a waiver needs a reason"),
        ("{CORE001: }", "2:17", "expected the reason as text, not nothing (null)"),
        ("{CORE001: true}", "2:18", "expected the reason as text, not the truth value true"),
        ("[CORE001]", "2:8", "expected a mapping, not a list"),
        ("{no rule: because}", "2:9", "not the id of a rule"),
    ],
)
def test_a_waiver_without_a_reason_is_a_fault(shell: CommandLine, waive: str, place: str, fault: str) -> None:
    ran = shell.run("check", shell.write(f"tiers: {{}}\nwaive: {waive}\n"))
    assert ran.code == 2
    assert f"error[config] c.yaml:{place}: " in ran.out
    assert fault in ran.out
