"""What a reader sees, word for word: one snapshot for each outcome."""

from __future__ import annotations

import pytest

from kvferry.api import Always, Check, Example, Fact, Known, Path, Rule, Severity
from kvferry.compat import OwnedRule, Waiver, check
from kvferry.compat.values import size_text

CAPACITY = Fact(path="tiers.cpu.capacity", value=1 << 20, origin="c.yaml:4:20")
CHUNK = Fact(path="engine.chunk_bytes", value=4 << 20, origin="engine")
BLOCK = Fact(path="engine.block_tokens", value=16, origin="engine")


def tier_rule(severity: Severity = Severity.ERROR) -> OwnedRule:
    rule = Rule(
        id="ZOO004",
        severity=severity,
        each="tiers",
        when=Known("engine.block_tokens"),
        require=Check(
            "tiers.*.capacity >= engine.chunk_bytes",
            ("tiers.*.capacity", "engine.chunk_bytes"),
            lambda capacity, chunk: bool(capacity >= chunk),
        ),
        message="the tier holds {tiers.*.capacity:size}, a chunk {engine.chunk_bytes:size}",
        fix="give it more than {engine.chunk_bytes:size}",
        source="design",
        examples=(Example(facts={}, passes=True),),
    )
    return OwnedRule(rule=rule, owner="zoo", distribution="acme-zoo 1.0")


def text_of(*facts: Fact, rules: tuple[OwnedRule, ...] = (), waivers: tuple[Waiver, ...] = ()) -> str:
    return check(rules or (tier_rule(),), {fact.path: fact for fact in facts}, waivers).text()


def test_violated() -> None:
    assert (
        text_of(CAPACITY, CHUNK, BLOCK)
        == """\
error[ZOO004] the tier holds 1 MiB, a chunk 4 MiB
  when     engine.block_tokens is known
  require  tiers.cpu.capacity >= engine.chunk_bytes
  fact     engine.block_tokens = 16  <- engine
  fact     tiers.cpu.capacity = 1048576 (1 MiB)  <- c.yaml:4:20
  fact     engine.chunk_bytes = 4194304 (4 MiB)  <- engine
  fix      give it more than 4 MiB
  source   design  (zoo, acme-zoo 1.0, since 0.1)

1 check: 1 error"""
    )


def test_unverified() -> None:
    assert (
        text_of(CAPACITY, BLOCK)
        == """\
error[ZOO004] could not be verified: tiers.cpu.capacity >= engine.chunk_bytes
  when     engine.block_tokens is known
  require  tiers.cpu.capacity >= engine.chunk_bytes
  fact     engine.block_tokens = 16  <- engine
  fact     tiers.cpu.capacity = 1048576 (1 MiB)  <- c.yaml:4:20
  missing  engine.chunk_bytes
  fix      run the check where what is missing is known, or give it in a file: kvferry check --facts \
FACTS FILE
  source   design  (zoo, acme-zoo 1.0, since 0.1)

1 check: 1 unverified error"""
    )


def test_waived() -> None:
    waiver = Waiver(rule_id="ZOO004", reason="bench only", origin="c.yaml:9:3")
    assert (
        text_of(CAPACITY, CHUNK, BLOCK, waivers=(waiver,))
        == """\
waived error[ZOO004] the tier holds 1 MiB, a chunk 4 MiB
  when     engine.block_tokens is known
  require  tiers.cpu.capacity >= engine.chunk_bytes
  fact     engine.block_tokens = 16  <- engine
  fact     tiers.cpu.capacity = 1048576 (1 MiB)  <- c.yaml:4:20
  fact     engine.chunk_bytes = 4194304 (4 MiB)  <- engine
  waiver   bench only  <- c.yaml:9:3
  fix      give it more than 4 MiB
  source   design  (zoo, acme-zoo 1.0, since 0.1)

1 check: 1 waived"""
    )


def test_not_applicable_is_only_counted() -> None:
    assert text_of(CAPACITY) == "1 check: 1 not applicable"


def test_ok_is_only_counted() -> None:
    big = Fact(path="tiers.cpu.capacity", value=1 << 30, origin="default")
    assert text_of(big, CHUNK, BLOCK) == "1 check: 1 ok"


def test_a_warning_and_a_note_are_told_and_an_unverified_note_is_counted() -> None:
    warning = tier_rule(Severity.WARNING)
    assert text_of(CAPACITY, CHUNK, BLOCK, rules=(warning,)).startswith("warning[ZOO004] the tier")
    note = tier_rule(Severity.NOTE)
    assert text_of(CAPACITY, CHUNK, BLOCK, rules=(note,)).startswith("note[ZOO004] the tier")
    assert text_of(CAPACITY, BLOCK, rules=(note,)) == "1 check: 1 unverified note"


def test_a_rule_that_fails_says_how() -> None:
    def explode(*_: object) -> bool:
        raise ValueError("odd")

    rule = Rule(
        id="ZOO009",
        severity=Severity.WARNING,
        when=Always(),
        require=Check("it holds", ("engine.block_tokens",), explode),
        message="m",
        fix="f",
        source="measured",
        examples=(),
    )
    assert (
        text_of(BLOCK, rules=(OwnedRule(rule=rule, owner="zoo"),))
        == """\
warning[ZOO009] could not be verified: it holds
  when     always
  require  it holds
  fact     engine.block_tokens = 16  <- engine
  broken   the rule itself failed with ValueError: odd
  fix      report it as a fault of zoo; until then waive ZOO009 with a reason
  source   measured  (zoo, since 0.1)

1 check: 1 unverified warning"""
    )


def test_an_unknown_waiver() -> None:
    waiver = Waiver(rule_id="ZOO005", reason="old", origin="c.yaml:9:3")
    assert (
        text_of(CAPACITY, waivers=(waiver,))
        == """\
warning: the waiver of ZOO005 names a rule that no loaded plugin owns
  fact     waive.ZOO005 = 'old'  <- c.yaml:9:3
  fix      did you mean 'ZOO004'? Otherwise remove it

1 check: 1 warning, 1 not applicable"""
    )


def test_strings_are_quoted_in_facts_and_plain_in_sentences() -> None:
    rule = Rule(
        id="ZOO001",
        severity=Severity.ERROR,
        when=Always(),
        require=Path("mode") == "fast",
        message="mode is {mode}",
        fix="write fast",
        source="design",
        examples=(),
    )
    shown = text_of(
        Fact(path="mode", value="slow", origin="env KVFERRY__MODE"),
        rules=(OwnedRule(rule=rule, owner="zoo"),),
    )
    assert "error[ZOO001] mode is slow\n" in shown
    assert "  require  mode == 'fast'\n" in shown
    assert "  fact     mode = 'slow'  <- env KVFERRY__MODE\n" in shown


def test_a_value_of_the_configuration_reads_as_it_is_written_there() -> None:
    quotas = Fact(path="tiers.t.quotas", value={"a": 8 << 30}, origin="c.yaml:4:9", written="{a: 8GiB}")
    rule = Rule(
        id="ZOO007",
        severity=Severity.ERROR,
        when=Always(),
        require=Check("nothing", ("tiers.*.quotas",), lambda _: False),
        message="tiers with quotas: {tiers.*.quotas:names}",
        fix="f",
        source="measured",
        examples=(),
    )
    shown = text_of(quotas, rules=(OwnedRule(rule=rule, owner="zoo"),))
    assert "  fact     tiers.t.quotas = {a: 8GiB}  <- c.yaml:4:9\n" in shown
    assert shown.startswith("error[ZOO007] tiers with quotas: t\n")


def test_what_a_variable_brought_about_is_mended_at_the_variable() -> None:
    tier = Fact(path="tiers.cpu.capacity", value=1 << 20, origin="env KVFERRY__TIERS__CPU__CAPACITY")
    shown = text_of(tier, CHUNK, BLOCK)
    fix = "change or unset KVFERRY__TIERS__CPU__CAPACITY, or else: give it more than 4 MiB"
    assert f"  fix      {fix}\n" in shown


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (2, "2 bytes"), (1 << 30, "1 GiB"), (1536, "1.5 KiB")],
)
def test_a_size_is_told_in_words(count: int, text: str) -> None:
    assert size_text(count) == text
