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
    "tiers.cpu.place.front": True,
    "tiers.cpu.place.idle_keys": (),
    "host.memory_bytes": 32 * GIB,
    "native.available": True,
    "native.why": "installed",
    "host.huge_pages_shmem": "advise",
}
FAR: dict[str, object] = {
    "tiers.far.use": "files",
    "tiers.far.path": "/cache",
    "tiers.far.capacity": 200 * GIB,
    "tiers.far.store": "write_through",
    "tiers.far.in_flight": GIB >> 2,
    "tiers.far.capabilities.addressable": False,
    "tiers.far.capabilities.persistent": True,
    "tiers.far.capabilities.max_value_bytes": None,
    "tiers.far.place.front": False,
    "tiers.far.place.idle_keys": (),
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


def tier_like_far(name: str, **changes: object) -> dict[str, object]:
    keys = {path.removeprefix("tiers.far."): value for path, value in FAR.items()}
    return {f"tiers.{name}.{key}": value for key, value in {**keys, **changes}.items()}


@pytest.mark.parametrize("more", [{}, tier_like_far("farther", path="/mnt")])
@pytest.mark.parametrize("engine", [{}, ENGINE])
def test_tiers_by_key_behind_memory_are_clean_and_leave_nothing_open(
    more: dict[str, object], engine: dict[str, object]
) -> None:
    facts = FILE_ALONE | FAR | more | engine
    assert violated(facts) == set()
    assert unverified(facts) == set()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tiers.far.capabilities.addressable": True, "tiers.far.capacity": GIB}, {"CORE005"}),
        (tier_like_far("near", path="/cache/../cache/"), {"CORE006"}),
        (tier_like_far("near", path="/cache", **{"capabilities.persistent": False}), set()),
        ({"tiers.far.capacity": 8 * GIB}, set()),
        ({"tiers.far.capacity": 8 * GIB - 1}, {"CORE007"}),
        ({"tiers.far.capacity": 1 * GIB, "tiers.far.store": "write_on_evict"}, set()),
        ({"tiers.cpu.place.idle_keys": ("store",)}, {"CORE008"}),
        ({"tiers.far.place.idle_keys": ("max_pinned",)}, {"CORE013"}),
        ({"tiers.far.in_flight": 2 * GIB}, set()),
        ({"tiers.far.in_flight": 2 * GIB + 1}, {"CORE009"}),
        ({"tiers.far.in_flight": 4 << 20}, set()),
        ({"tiers.far.in_flight": (4 << 20) - 1}, {"CORE010"}),
        ({"tiers.far.capacity": 1 << 20, "tiers.far.store": "write_on_evict"}, {"CORE004"}),
        ({"tiers.far.capacity": 4 << 20, "tiers.far.store": "write_on_evict"}, {"CORE011"}),
        ({"tiers.far.capacity": (4 << 20) + 4096, "tiers.far.store": "write_on_evict"}, set()),
        ({"tiers.far.capabilities.max_value_bytes": 4 << 20}, set()),
        ({"tiers.far.capabilities.max_value_bytes": (4 << 20) - 1}, {"CORE012"}),
    ],
)
def test_one_change_about_a_lower_tier_breaks_one_rule(
    changes: dict[str, object], expected: set[str]
) -> None:
    assert violated(FILE_ALONE | ENGINE | FAR | changes) == expected
    assert unverified(FILE_ALONE | ENGINE | FAR | changes) == set()


def test_tiers_in_the_wrong_order_are_one_complaint_about_the_first() -> None:
    swapped = {
        "tiers.cpu.place.front": False,
        "tiers.far.place.front": True,
        "tiers.far.place.idle_keys": ("store",),
        "tiers.far.capacity": 1 << 20,
    }
    report = judge(FILE_ALONE | FAR | swapped)
    assert [(f.rule.id, f.member) for f in report.select(Outcome.VIOLATED)] == [("CORE003", "far")]
    assert "cpu: {use: cpu, capacity: 16GiB}" in report.text()


@pytest.mark.parametrize(
    ("path", "rule_ids"),
    [
        # A tier whose capacity could not be judged (CORE004) is not judged a second time (CORE011).
        ("engine.chunk_bytes", {"CORE004", "CORE010", "CORE012"}),
        ("tiers.far.in_flight", {"CORE009", "CORE010"}),
        ("tiers.far.capabilities.max_value_bytes", {"CORE012"}),
    ],
)
def test_what_is_not_known_about_a_lower_tier_is_not_a_pass(path: str, rule_ids: set[str]) -> None:
    facts = FILE_ALONE | ENGINE | FAR
    del facts[path]
    assert unverified(facts) == rule_ids


def test_an_engine_that_cannot_be_cached_is_not_refused_over_a_lower_tier() -> None:
    odd = {"engine.group_kinds": ("mamba",), "engine.chunk_bytes": 9 * GIB, "tiers.far.in_flight": 1}
    assert violated(FILE_ALONE | ENGINE | FAR | odd) == {"CORE024"}


def test_each_lower_tier_is_told_by_its_own_name() -> None:
    facts = FILE_ALONE | FAR | tier_like_far("deep", path="/mnt", in_flight=3 * GIB)
    found = judge(facts).select(Outcome.VIOLATED)
    assert [(f.rule.id, f.member) for f in found] == [("CORE009", "deep")]
    assert "may hold 3 GiB of the first tier's 8 GiB" in found[0].message


@given(
    workers=st.none() | st.integers(1, 16),
    capacity=st.integers(1, 64 * GIB),
    memory=st.integers(1, 64 * GIB),
    sharing=st.dictionaries(st.sampled_from(["staging", "landing"]), st.integers(1, 16 * GIB)),
)
def test_the_host_budget_gives_one_verdict(
    workers: int | None, capacity: int, memory: int, sharing: dict[str, int]
) -> None:
    facts: dict[str, Any] = {
        "tiers.cpu.capacity": capacity,
        "tiers.cpu.capabilities.addressable": True,
        "tiers.disk.capacity": 1 << 50,
        "tiers.disk.capabilities.addressable": False,
        "host.memory_bytes": memory,
    }
    if workers is not None:
        facts["engine.workers"] = workers
    facts |= {f"sharing.{name}.host_bytes": size for name, size in sharing.items()}
    need = (workers or 1) * (capacity + sum(sharing.values()))
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
