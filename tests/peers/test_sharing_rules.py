"""The rules of sharing and of staging together: each mode of reading works, or is one fault with one id."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from kvferry.api import Fact, HostEnvironment, Rule
from kvferry.compat import Outcome, OwnedRule, check
from kvferry.config import ConfigSources
from kvferry.runtime.together import Together, examine_together
from kvferry_host_staging.rules import RULES as STAGING_RULES
from kvferry_sharing_p2p.rules import RULES as SHARING_RULES

ALL: tuple[Rule, ...] = (*SHARING_RULES, *STAGING_RULES)
GIB = 1 << 30
GOOD: dict[str, object] = {
    "p2p.use": "p2p",
    "p2p.listen": "tcp://127.0.0.1:0",
    "p2p.pull": True,
    "p2p.delay": False,
    "p2p.land_on": "host",
    "p2p.buffer": 128 << 20,
    "p2p.keep": True,
    "p2p.lease": 30.0,
    "p2p.guard": 1.0,
    "p2p.load_deadline": 5.0,
    "lookup.use": "controller",
    "lookup.url": "tcp://127.0.0.1:9900",
    "lookup.secret_file": "",
    "lookup.secret_variable": "",
    "channel.use": "road",
    "channel.capabilities.read": True,
    "channel.capabilities.same_host": False,
    "channel.capabilities.staging": True,
    "channel.capabilities.max_registered_bytes": 20 * GIB,
    "staging.use": None,
    "staging.capacity": 8 * GIB,
    "tiers.cpu.use": "cpu",
    "tiers.cpu.capacity": 16 * GIB,
    "tiers.cpu.place.front": True,
    "tiers.cpu.capabilities.persistent": False,
    "tiers.cpu.capabilities.shared": False,
    "tiers.cpu.capabilities.servable_to_peers": True,
}
DELAYED: dict[str, object] = {"p2p.delay": True, "p2p.land_on": "device"}
STAGED: dict[str, object] = {"staging.use": "host"}
ENGINE: dict[str, object] = {
    "engine.block_tokens": 128,
    "engine.chunk_bytes": 4 << 20,
    "engine.group_kinds": ("full",),
}
MODES = [
    dict(zip(("p2p.pull", "p2p.delay", "p2p.land_on"), values, strict=True))
    for values in product((True, False), (True, False), ("device", "host"))
]
VERDICTS = {
    # pull, delay, land_on: without a staging, and with one
    (True, True, "device"): (set(), set()),
    (True, False, "host"): (set(), set()),
    (True, False, "device"): ({"P2P009"}, {"STG004"}),
    (True, True, "host"): ({"P2P008"}, {"P2P008"}),
    (False, True, "device"): ({"P2P007"}, {"STG003"}),
    (False, True, "host"): ({"P2P007"}, {"STG003"}),
    (False, False, "device"): ({"P2P006"}, {"STG003"}),
    (False, False, "host"): ({"P2P006"}, {"STG003"}),
}


def told(values: dict[str, object], outcome: Outcome = Outcome.VIOLATED) -> set[str]:
    facts = {path: Fact(path=path, value=value, origin="test") for path, value in values.items()}
    report = check([OwnedRule(rule=rule, owner="test") for rule in ALL], facts)
    assert [finding.broken for finding in report.findings if finding.broken] == []
    return {finding.rule.id for finding in report.select(outcome)}


@pytest.mark.parametrize("staged", [False, True], ids=["plain", "staged"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_each_mode_works_or_is_one_fault(mode: dict[str, object], staged: bool) -> None:
    facts = GOOD | ENGINE | mode | (STAGED if staged else {})
    assert told(facts) == VERDICTS[tuple(mode.values())][staged]  # type: ignore[index]
    assert told(facts, Outcome.UNVERIFIED) == set()


@pytest.mark.parametrize("more", [{}, STAGED, DELAYED, {**STAGED, **DELAYED}])
def test_a_file_alone_leaves_nothing_open(more: dict[str, object]) -> None:
    assert told(GOOD | more) == set()
    assert told(GOOD | more, Outcome.UNVERIFIED) == set()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"p2p.keep": False}, {"P2P010"}),
        ({**DELAYED, "p2p.keep": False}, set()),
        ({**DELAYED, "p2p.buffer": (8 << 20) - 1}, {"P2P011"}),
        ({**DELAYED, "p2p.buffer": 8 << 20}, set()),
        ({"p2p.buffer": 1}, set()),
        ({**STAGED, "p2p.buffer": (8 << 20) - 1}, {"P2P011"}),
        ({"p2p.guard": 30.0}, {"P2P013"}),
        ({"p2p.load_deadline": 29.5}, {"P2P014"}),
        ({"p2p.load_deadline": 29.0}, set()),
        ({"tiers.cpu.capacity": 20 * GIB + 1}, {"P2P015"}),
        ({"tiers.cpu.capacity": 20 * GIB + 1, **STAGED}, set()),
        ({**DELAYED, "tiers.cpu.capacity": 20 * GIB}, {"P2P015"}),
        ({"channel.capabilities.read": False}, {"P2P019"}),
        ({"channel.capabilities.same_host": True}, set()),
        (
            {
                "channel.capabilities.same_host": True,
                "p2p.listen": "tcp://10.0.0.1:9970",
                "lookup.secret_variable": "S",
            },
            {"P2P030"},
        ),
        ({**DELAYED, "engine.group_kinds": ("full", "sliding")}, {"P2P029"}),
        ({**STAGED, "channel.capabilities.staging": False}, {"STG005"}),
        ({**STAGED, "staging.capacity": (4 << 20) - 1}, {"STG006"}),
        ({**STAGED, "staging.capacity": 4 << 20}, set()),
        ({**STAGED, "staging.capacity": 20 * GIB}, {"STG007"}),
        ({**STAGED, "channel.capabilities.max_registered_bytes": None}, {"STG008"}),
        ({**STAGED, "channel.use": None}, {"P2P004", "STG002"}),
        ({**STAGED, "p2p.use": None}, {"STG001"}),
        ({"p2p.use": None, "p2p.pull": False, "p2p.delay": True, "p2p.guard": 99.0}, set()),
    ],
)
def test_one_change_breaks_one_rule(changes: dict[str, object], expected: set[str]) -> None:
    assert told(GOOD | ENGINE | changes) == expected
    assert told(GOOD | ENGINE | changes, Outcome.UNVERIFIED) == set()


@pytest.mark.parametrize(
    ("more", "rules"), [(STAGED, {"P2P011", "STG006"}), (DELAYED, {"P2P011"}), ({}, set())]
)
def test_with_an_engine_a_chunk_of_unknown_size_is_not_a_pass(
    more: dict[str, object], rules: set[str]
) -> None:
    facts = GOOD | ENGINE | more
    del facts["engine.chunk_bytes"]
    assert told(facts, Outcome.UNVERIFIED) == rules


def test_an_engine_that_cannot_be_cached_is_not_refused_over_sizes() -> None:
    odd = {"engine.group_kinds": ("full", "mamba"), "engine.chunk_bytes": 9 * GIB}
    assert told(GOOD | ENGINE | STAGED | odd) == set()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"P2P012"}),
        ({"capabilities.servable_to_peers": True}, set()),
        ({"capabilities.shared": True}, set()),
        ({"capabilities.persistent": False}, set()),
    ],
)
def test_a_tier_of_which_peers_see_nothing_is_told(changes: dict[str, object], expected: set[str]) -> None:
    far: dict[str, object] = {
        "use": "files",
        "place.front": False,
        "capabilities.persistent": True,
        "capabilities.shared": False,
        "capabilities.servable_to_peers": False,
    }
    facts = {f"tiers.far.{key}": value for key, value in {**far, **changes}.items()}
    assert told({**GOOD, **facts, "tiers.far.capacity": 1 << 50}) == expected
    assert told({**GOOD, **facts, "tiers.far.capacity": 1 << 50, "p2p.use": None}) == set()


FILE = """\
plugins: [backend_cpu, transport_tcp, transport_local, sharing_p2p]
instance: {name}
tiers: {{cpu: {{use: cpu, capacity: 1MiB}}}}
channel: {{use: tcp}}
lookup: {{use: controller}}
p2p: {{use: p2p}}
"""


def together(folder: Path, *changes: dict[str, str]) -> Together:
    sources = []
    for name, change in zip("ab", changes, strict=True):
        text = FILE.format(name=name)
        for before, after in change.items():
            text = text.replace(before, after) if before in text else f"{text}{before}: {after}\n"
        file = folder / f"{name}.yaml"
        file.write_text(text)
        sources.append(ConfigSources(file=file, environment={}, overrides={}))
    return examine_together(sources, HostEnvironment(variables={}))


def differ(found: Together) -> set[str]:
    assert found.fleet is not None
    assert not [each.config_faults for each in found.examinations if each.config_faults]
    told = {finding.rule.id for finding in found.fleet.select(Outcome.VIOLATED)}
    return {rule for rule in told if not rule.startswith("CORE")}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({}, {}, set()),
        ({"chunk_tokens": "128"}, {}, {"P2P023"}),
        ({}, {"{use: tcp}": "{use: local}"}, {"P2P025"}),
        ({"model_identity": "m"}, {"model_identity": "n"}, {"P2P022"}),
        ({"model_identity": "m", "chunk_tokens": "128"}, {"model_identity": "n"}, {"P2P022"}),
        ({"model_identity": "m"}, {}, set()),
        ({"{use: p2p}": "{use: p2p, listen: 'tcp://127.0.0.1:9970'}"},) * 2 + ({"P2P016"},),
        (
            {"{use: controller}": "{use: controller, url: 'tcp://127.0.0.1:9901'}"},
            {},
            {"P2P018"},
        ),
        (
            {
                "{use: p2p}": "{use: p2p, listen: 'tcp://10.0.0.1:9970'}",
                "{use: controller}": "{use: controller, secret_variable: S}",
            },
            {"{use: controller}": "{use: controller, secret_variable: S}"},
            {"P2P017"},
        ),
        (
            {"{use: tcp}": "{use: tcp, listen: ['10.0.0.1:9960'], secret_variable: S}"},
            {"{use: tcp}": "{use: tcp, listen: ['127.0.0.1:9960']}"},
            {"TCP009"},
        ),
    ],
)
def test_files_of_peers_that_would_refuse_each_other_are_told_so(
    tmp_path: Path, one: dict[str, str], other: dict[str, str], expected: set[str]
) -> None:
    assert differ(together(tmp_path, one, other)) == expected
    assert differ(together(tmp_path, other, one)) == expected
