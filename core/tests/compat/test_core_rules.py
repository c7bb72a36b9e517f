"""Core's rules, and the helpers that hold every rule to its own examples."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import Always, Check, Example, Fact, Path, Rule, Severity
from kvferry.compat import Outcome, OwnedRule, Report, check, core_rules, rule_faults, run_examples

GIB = 1 << 30
FILE_ALONE: dict[str, object] = {
    "chunk_tokens": 256,
    "tiers.cpu.use": "cpu",
    "tiers.cpu.capacity": 8 * GIB,
    "tiers.cpu.capabilities.addressable": True,
    "host.memory_bytes": 32 * GIB,
    "native.available": True,
    "native.why": "installed",
    "host.huge_pages_shmem": "advise",
}
ENGINE: dict[str, object] = {
    "engine.block_tokens": 128,
    "engine.chunk_bytes": 4 << 20,
    "engine.workers": 2,
    "engine.device": "cpu",
    "engine.group_kinds": ("full",),
}


def judge(values: dict[str, object]) -> Report:
    facts = {path: Fact(path=path, value=value, origin="test") for path, value in values.items()}
    return check([OwnedRule(rule=rule, owner="core") for rule in core_rules()], facts)


def violated(values: dict[str, object]) -> set[str]:
    return {finding.rule.id for finding in judge(values).select(Outcome.VIOLATED)}


def unverified(values: dict[str, object]) -> set[str]:
    return {finding.rule.id for finding in judge(values).select(Outcome.UNVERIFIED)}


@pytest.mark.parametrize("rule", core_rules(), ids=lambda rule: rule.id)
def test_a_rule_is_well_formed_and_judges_its_examples_right(rule: Rule) -> None:
    assert rule_faults([rule], "CORE") == ()
    assert run_examples(rule) == ()


def test_ids_are_unique() -> None:
    assert rule_faults(core_rules(), "CORE") == ()


def test_a_good_file_alone_is_clean_and_leaves_nothing_open() -> None:
    assert violated(FILE_ALONE) == set()
    assert unverified(FILE_ALONE) == set()


def test_a_good_file_with_its_engine_is_clean_and_leaves_nothing_open() -> None:
    assert violated(FILE_ALONE | ENGINE) == set()
    assert unverified(FILE_ALONE | ENGINE) == set()


@pytest.mark.parametrize(
    ("path", "rule_ids"),
    [
        ("engine.chunk_bytes", {"CORE004"}),
        ("engine.device", {"CORE023"}),
        ("engine.group_kinds", {"CORE024"}),
    ],
)
def test_with_an_engine_a_missing_fact_is_not_a_pass(path: str, rule_ids: set[str]) -> None:
    facts = FILE_ALONE | ENGINE | {"chunk_tokens": 256}
    del facts[path]
    assert unverified(facts) == rule_ids


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"engine.device": "npu"}, {"CORE023"}),
        ({"engine.group_kinds": ("mamba",)}, {"CORE024"}),
        ({"engine.chunk_bytes": 9 * GIB}, {"CORE004"}),
        ({"engine.chunk_bytes": 9 * GIB, "engine.group_kinds": ("mamba",)}, {"CORE024"}),
    ],
)
def test_a_fact_of_the_engine_is_judged_as_soon_as_it_is_known(
    facts: dict[str, object], expected: set[str]
) -> None:
    assert violated(FILE_ALONE | facts) == expected
    assert unverified(FILE_ALONE | facts) == set()


def test_no_number_makes_a_rule_fail_itself() -> None:
    nothing = {"engine.block_tokens": 0, "engine.chunk_bytes": 0, "engine.workers": 0}
    report = judge(FILE_ALONE | ENGINE | nothing)
    assert [finding.broken for finding in report.findings if finding.broken] == []
    assert "CORE020" in violated(FILE_ALONE | ENGINE | nothing)


def test_an_engine_that_cannot_be_cached_is_not_refused_over_sizes() -> None:
    odd = {"engine.block_tokens": 544, "engine.group_kinds": ("full", "mamba")}
    assert violated(FILE_ALONE | ENGINE | odd) == {"CORE024"}
    none = {"engine.block_tokens": 0, "engine.chunk_bytes": 0, "engine.group_kinds": ()}
    assert violated(FILE_ALONE | ENGINE | none) == set()
    assert unverified(FILE_ALONE | ENGINE | none) == set()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tiers.cpu.capacity": 1 << 20}, {"CORE004"}),
        ({"chunk_tokens": 200}, {"CORE020"}),
        ({"engine.device": "npu"}, {"CORE023"}),
        ({"engine.device": "npu", "devices.npu.name": "npu"}, set()),
        ({"engine.group_kinds": ("full", "mamba")}, {"CORE024"}),
        ({"engine.workers": 8}, {"CORE040"}),
        ({"engine.workers": 4}, {"CORE041"}),
        ({"native.available": False}, {"CORE044"}),
        ({"host.huge_pages_shmem": "never"}, {"CORE045"}),
        ({"tiers.cpu.capabilities.addressable": False}, {"CORE003"}),
    ],
)
def test_one_change_breaks_one_rule(changes: dict[str, object], expected: set[str]) -> None:
    assert violated(FILE_ALONE | ENGINE | changes) == expected


def test_without_tiers_the_missing_tier_is_the_only_complaint() -> None:
    facts = {path: value for path, value in FILE_ALONE.items() if not path.startswith("tiers.")}
    assert violated(facts) == {"CORE001"}
    assert unverified(facts) == set()


def test_several_tiers_are_refused_by_name() -> None:
    more = {
        "tiers.far.use": "files",
        "tiers.far.capacity": GIB,
        "tiers.far.capabilities.addressable": False,
    }
    report = judge(FILE_ALONE | more)
    assert {f.rule.id for f in report.select(Outcome.VIOLATED)} == {"CORE002", "CORE003"}
    assert "several tiers are configured (cpu, far)" in report.text()


@given(
    workers=st.none() | st.integers(1, 16),
    capacity=st.integers(1, 64 * GIB),
    memory=st.integers(1, 64 * GIB),
)
def test_the_host_budget_gives_one_verdict(workers: int | None, capacity: int, memory: int) -> None:
    facts: dict[str, Any] = {
        "tiers.cpu.capacity": capacity,
        "tiers.cpu.capabilities.addressable": True,
        "tiers.disk.capacity": 1 << 50,
        "tiers.disk.capabilities.addressable": False,
        "host.memory_bytes": memory,
    }
    if workers is not None:
        facts["engine.workers"] = workers
    need = (workers or 1) * capacity
    error, warning = ("CORE042", "CORE043") if workers is None else ("CORE040", "CORE041")
    budget = violated(facts) & {"CORE040", "CORE041", "CORE042", "CORE043"}
    if need > memory:
        assert budget == {error}
    elif need > 0.8 * memory:
        assert budget == {warning}
    else:
        assert budget == set()


BIG = Check("size >= 2", ("size",), lambda size: bool(size >= 2))
GOOD = Rule(
    id="ZOO001",
    severity=Severity.ERROR,
    when=Path("on") == True,  # noqa: E712
    require=BIG,
    message="size is {size}",
    fix="more",
    source="design",
    examples=(
        Example(facts={"on": True, "size": 2}, passes=True),
        Example(facts={"on": False}, passes=True),
        Example(facts={"on": True, "size": 1}, passes=False),
    ),
)


def test_a_good_rule_has_no_fault() -> None:
    assert rule_faults([GOOD], "ZOO") == ()
    assert run_examples(GOOD) == ()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"id": "CPU001"}, "does not begin with the plugin's prefix 'ZOO'"),
        ({"id": "ZOOX01"}, "followed by three or more digits"),
        ({"id": "ZOO01"}, "followed by three or more digits"),
        ({"severity": "error"}, "not a kvferry.api.Severity"),
        ({"when": True}, "needs kvferry.api expressions"),
        ({"message": "{other}"}, "names the fact 'other' in its text"),
        ({"fix": "{other:size}"}, "names the fact 'other' in its text"),
        ({"examples": GOOD.examples[:2]}, "one passing and one failing"),
        ({"examples": GOOD.examples[2:]}, "one passing and one failing"),
    ],
)
def test_a_bad_rule_is_told(changes: dict[str, Any], fault: str) -> None:
    (found,) = rule_faults([evolve(GOOD, **changes)], "ZOO")
    assert fault in found


def test_the_same_id_twice_is_told() -> None:
    assert "is given twice" in rule_faults([GOOD, GOOD], "ZOO")[0]


def test_examples_that_lie_are_told() -> None:
    wrong = [
        (Example(facts={"on": True, "size": 1}, passes=True), "should pass"),
        (Example(facts={"on": True, "size": 2}, passes=False), "should fail"),
        (Example(facts={"on": False}, passes=False), "should fail"),
        (Example(facts={"on": True}, passes=False), "is unverified"),
    ]
    for example, complaint in wrong:
        (found,) = run_examples(evolve(GOOD, examples=(*GOOD.examples, example)))
        assert complaint in found
    idle = evolve(GOOD, examples=(Example(facts={"on": False}, passes=True), GOOD.examples[2]))
    assert "no example in which it applies and holds" in run_examples(idle)[0]


def test_an_example_must_fill_the_message() -> None:
    either = Check("it is off", ("on",), lambda on: not on) | (BIG)
    rule = evolve(
        GOOD,
        when=Always(),
        require=Check("no", ("on",), lambda on: not on) & either,
        examples=(
            Example(facts={"on": False}, passes=True),
            Example(facts={"on": True}, passes=False),
        ),
    )
    assert "leaves a gap in the message: size is (unknown)" in run_examples(rule)[0]
