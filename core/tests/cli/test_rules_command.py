"""``kvferry rules`` and ``kvferry rules explain``."""

from __future__ import annotations

import json

import pytest

from kvferry.api import Always, Check, Example, FactKind, FactSource, FactSpec, Rule, Severity
from kvferry.cli.rules_command import explanation_text, rules_table
from kvferry.compat import FactCatalogue, OwnedFactSpec, OwnedRule, core_rules
from kvferry.compat.explanation import explain

from .conftest import CommandLine

CORE = [OwnedRule(rule=rule, owner="core") for rule in core_rules()]


def test_without_a_plugin_core_s_rules_are_listed_one_a_line(shell: CommandLine) -> None:
    ran = shell.run("rules")
    assert ran.code == 0
    head, *lines = ran.out.splitlines()
    assert head.split() == ["ID", "SEVERITY", "OWNER", "SINCE", "MUST", "HOLD"]
    assert [line.split()[0] for line in lines] == [rule.id for rule in core_rules()]
    assert "CORE001  error     core   0.1    at least one tier is configured" in lines


@pytest.mark.parametrize("how", ["file", "plugin", "environment"])
def test_a_plugin_s_rules_are_listed_when_it_is_named(shell: CommandLine, how: str) -> None:
    words = ["rules"]
    if how == "file":
        words.append(shell.write())
    elif how == "plugin":
        words += ["--plugin", "backend_tape"]
    else:
        shell.environment["KVFERRY_CONFIG"] = shell.write()
    ran = shell.run(*words)
    assert ran.code == 0
    last = ran.out.splitlines()[-1].split()
    assert last == ["TAPE001", "warning", "backend_tape", "0.1", "tiers.*.reel", "<=", "9"]


def test_a_plugin_that_cannot_be_used_is_told_and_the_others_are_listed(shell: CommandLine) -> None:
    ran = shell.run("rules", "--plugin", "nowhere", "--plugin", "backend_tape")
    assert ran.code == 4
    assert "TAPE001" in ran.out
    assert "error[plugin] --plugin: plugin 'nowhere' is not installed" in ran.err
    bad = shell.run("rules", shell.write("plugins: [backend_tape]\ntears: {}\n"))
    assert bad.code == 2
    assert "TAPE001" in bad.out
    assert "c.yaml:2:1: tears: unknown key" in bad.err


def test_explain_shows_everything_of_a_rule(shell: CommandLine) -> None:
    ran = shell.run("rules", "explain", "tape001", "--plugin", "backend_tape")
    assert ran.code == 0
    assert (
        ran.out
        == """\
warning[TAPE001] about each of tiers; by backend_tape (kvferry-backend-tape 1.0), since 0.1
  when     tiers.*.reel is known
  require  tiers.*.reel <= 9
  message  reel {tiers.*.reel} is far away
  fix      use a reel up to 9
  source   design

  facts that it reads
    tiers.*.reel  whole number, from the configuration: a key of the configuration

  an example that passes
    tiers.t.reel = 1

  an example that fails
    tiers.t.reel = 10
    message  reel 10 is far away
"""
    )


def test_explain_names_what_a_rule_stands_on_and_that_it_cannot_be_waived(shell: CommandLine) -> None:
    ran = shell.run("rules", "explain", "CORE041", "CORE001")
    assert "  after    CORE040: engine.workers x (sum of tiers.*.capacity in memory and of " in ran.out
    assert ran.out.count("  waiver   cannot be waived\n") == 1


def test_an_unknown_id_ends_with_2_and_the_nearest(shell: CommandLine) -> None:
    ran = shell.run("rules", "explain", "CORE24")
    assert ran.code == 2
    assert ran.out == ""
    assert "there is no rule 'CORE24'" in ran.err
    assert "did you mean 'CORE024'?" in ran.err
    tape = shell.run("rules", "explain", "TAPE001")
    assert tape.code == 2
    assert tape.out == ""
    assert "  fix  kvferry rules explain TAPE001 --plugin backend_tape\n" in tape.err
    other = shell.run("rules", "explain", "REEL001")
    assert "kvferry rules explain REEL001 --plugin backend_tape\n" in other.err


@pytest.mark.parametrize(
    "words",
    [
        ("rules", "explain", "--plugin", "backend_tape", "TAPE001"),
        ("rules", "--plugin", "backend_tape", "explain", "TAPE001"),
        ("rules", "TAPE001", "--plugin", "backend_tape"),
        ("rules", "--plugin", "backend_tape", "tape001"),
    ],
)
def test_a_rule_is_explained_however_it_is_asked_for(shell: CommandLine, words: tuple[str, ...]) -> None:
    ran = shell.run(*words)
    assert ran.code == 0
    assert ran.out.startswith("warning[TAPE001] about each of tiers")


def test_a_file_with_the_name_of_a_rule_is_a_file(
    shell: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.write(name="tape001")
    monkeypatch.chdir(shell.root)
    assert shell.run("rules", "tape001").out.startswith("ID  ")


def test_a_misspelt_explain_is_told_what_was_meant(shell: CommandLine) -> None:
    ran = shell.run("rules", "explian", "CORE001", "CORE002")
    assert ran.code == 2
    assert "kvferry rules explain CORE001 CORE002" in ran.err


@pytest.mark.parametrize("words", [["rules", "explain"], ["rules", "a.yaml", "b.yaml"]])
def test_words_that_mean_nothing_end_with_2(shell: CommandLine, words: list[str]) -> None:
    ran = shell.run(*words)
    assert ran.code == 2
    assert ran.err.startswith("'kvferry rules")


def test_json_has_the_same_rules_in_a_stable_shape(shell: CommandLine) -> None:
    ran = shell.run("rules", "--plugin", "backend_tape", "--format", "json")
    assert ran.json["schema"] == 1
    rules = {rule["id"]: rule for rule in ran.json["rules"]}
    assert set(rules) == {*(rule.id for rule in core_rules()), "TAPE001"}
    assert set(rules["TAPE001"]) == {
        *("id", "severity", "scope", "each", "waivable", "requires", "when", "require", "message"),
        *("fix", "source", "owner", "distribution", "since", "facts", "examples"),
    }
    assert rules["CORE041"]["requires"] == ["CORE040"]
    assert rules["CORE060"]["scope"] == "pair"
    facts = {fact["path"]: fact for fact in rules["CORE004"]["facts"]}
    assert facts["engine.chunk_bytes"] == {
        "path": "engine.chunk_bytes",
        "kind": "size",
        "source": "engine",
        "meaning": "bytes of one chunk of chunk_tokens in one worker",
        "owner": "core",
    }
    passing, failing = rules["TAPE001"]["examples"]
    assert (passing["passes"], passing["outcome"], passing["message"]) == (True, "ok", "")
    assert (failing["facts"], failing["outcome"]) == ({"tiers.t.reel": 10}, "violated")
    one = shell.run("rules", "explain", "CORE001", "--format", "json")
    assert [rule["id"] for rule in one.json["rules"]] == ["CORE001"]
    assert json.dumps(one.json["rules"][0]) == json.dumps(rules["CORE001"])


def test_an_example_is_told_by_the_member_that_it_is_about(shell: CommandLine) -> None:
    (rule,) = shell.run("rules", "explain", "CORE007", "--format", "json").json["rules"]
    # The first tier, to which the rule does not apply, stands in each of them.
    assert [each["outcome"] for each in rule["examples"]] == ["ok", "not-applicable", "violated"]


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_a_table_keeps_to_the_width_of_the_terminal(columns: int) -> None:
    lines = rules_table(CORE, columns)
    assert max(map(len, lines)) <= columns
    starts = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert starts == ["ID", *(rule.id for rule in core_rules())]
    words = " ".join(" ".join(lines).split())
    assert "at least one tier is configured" in words


def test_a_wide_terminal_and_a_pipe_break_nothing() -> None:
    assert len(rules_table(CORE, None)) == len(CORE) + 1
    assert len(rules_table(CORE, 200)) == len(CORE) + 1


LONG = Rule(
    id="ZOO001",
    severity=Severity.NOTE,
    when=Always(),
    require=Check("speed is fine", ("speed",), lambda speed: bool(speed > 3)),
    message="the speed of {speed} is less than what one would expect of a machine of this kind by far",
    fix="look for what slows it down, for example a power setting, or a neighbour that is too loud",
    source="measured",
    examples=(Example(facts={"speed": 4}, passes=True), Example(facts={"speed": 1}, passes=False)),
)
SPEED = FactSpec(path="speed", kind=FactKind.COUNT, meaning="how fast it is " * 8, source=FactSource.HOST)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_an_explanation_keeps_to_the_width_and_loses_no_word(columns: int) -> None:
    owned = OwnedRule(rule=LONG, owner="zoo")
    explanation = explain(owned, FactCatalogue([OwnedFactSpec(spec=SPEED, owner="zoo")]))
    lines = explanation_text(explanation, [owned], columns)
    assert max(map(len, lines)) <= columns
    narrow = " ".join(" ".join(lines).split())
    assert narrow == " ".join(" ".join(explanation_text(explanation, [owned], None)).split())
