"""What the rules of the local channel say, with what this host and others let processes do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvferry.api import Fact, HostEnvironment, Truth
from kvferry_transport_local.facts import CROSS_PROCESS, MAPPED, POSSIBLE, probe_facts
from kvferry_transport_local.options import Mechanism
from kvferry_transport_local.rules import RULES

NOT_JUDGED = None


def verdicts(values: Mapping[str, object]) -> dict[str, Truth | None]:
    """By rule, whether what it wants holds, or that it does not apply."""
    facts = {path: Fact(path=path, value=value, origin="test") for path, value in values.items()}
    return {
        rule.id: rule.require.evaluate(facts) if rule.when.evaluate(facts) is Truth.TRUE else NOT_JUDGED
        for rule in RULES
    }


def channel(mechanism: Mechanism, **host: str) -> dict[str, object]:
    return {"channel.use": "local", "channel.mechanism": mechanism.value, **host}


def probed(environment: HostEnvironment) -> dict[str, str]:
    return {fact.path: fact.value for fact in probe_facts(environment)}


@pytest.mark.parametrize("use", [None, "tcp"])
def test_no_rule_applies_to_another_channel_or_to_none(use: str | None) -> None:
    host = {MAPPED: "no", CROSS_PROCESS: "no", "channel.mechanism": "cross-process"}
    assert set(verdicts({"channel.use": use, **host}).values()) == {NOT_JUDGED}


@pytest.mark.parametrize("mechanism", Mechanism)
def test_a_host_that_allows_everything_breaks_no_rule(mechanism: Mechanism) -> None:
    found = verdicts(channel(mechanism, **{MAPPED: POSSIBLE, CROSS_PROCESS: POSSIBLE}))
    assert set(found.values()) <= {Truth.TRUE, NOT_JUDGED}
    assert found["LOC003"] is Truth.TRUE


@pytest.mark.parametrize("mechanism", Mechanism)
def test_what_is_not_known_of_a_host_is_no_pass(mechanism: Mechanism) -> None:
    found = verdicts(channel(mechanism))
    assert found["LOC003"] is Truth.UNKNOWN
    asked = mechanism is Mechanism.CROSS_PROCESS
    assert found["LOC001"] is (Truth.UNKNOWN if asked else NOT_JUDGED)


@pytest.mark.parametrize("scope", [0, 1, 2, 3])
def test_what_yama_forbids_is_an_error_only_where_it_was_asked_for(tmp_path: Path, scope: int) -> None:
    setting = tmp_path / "proc/sys/kernel/yama/ptrace_scope"
    setting.parent.mkdir(parents=True)
    setting.write_text(f"{scope}\n")
    host = probed(HostEnvironment(root=str(tmp_path)))
    if scope > 1:
        assert "ptrace_scope" in host[CROSS_PROCESS]
    allowed = Truth.of(host[CROSS_PROCESS] == POSSIBLE)
    found = {each: verdicts(channel(each, **host)) for each in Mechanism}
    assert found[Mechanism.CROSS_PROCESS]["LOC001"] is allowed
    assert found[Mechanism.AUTO]["LOC002"] is allowed
    assert (found[Mechanism.AUTO]["LOC001"], found[Mechanism.CROSS_PROCESS]["LOC002"]) == (NOT_JUDGED,) * 2
    assert set(found[Mechanism.MAPPED].values()) == {NOT_JUDGED, Truth.of(host[MAPPED] == POSSIBLE)}


def test_without_memory_files_there_is_no_such_channel() -> None:
    for mechanism in Mechanism:
        refused = {MAPPED: "the system gives no memory files", CROSS_PROCESS: POSSIBLE}
        assert verdicts(channel(mechanism, **refused))["LOC003"] is Truth.FALSE
