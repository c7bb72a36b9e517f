"""What the rules of the TCP channel say of addresses, against what the channel and the system do."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.api import ChannelContext, ErrorKind, Fact, KVFerryError, Truth
from kvferry_transport_tcp.address import Address, parse_address
from kvferry_transport_tcp.channel import TCPChannel
from kvferry_transport_tcp.options import TCPOptions
from kvferry_transport_tcp.rules import RULES
from plugins.transport_tcp.tests.tcp_sides import PATIENCE

NOT_JUDGED = None


def facts_of(listen: Sequence[str], advertise: Sequence[str] = (), **more: object) -> Mapping[str, object]:
    return {
        "channel.use": "tcp",
        "channel.listen": tuple(listen),
        "channel.advertise": tuple(advertise),
        "channel.secret_variable": "",
        **{name.replace("__", "."): value for name, value in more.items()},
    }


def verdict(rule_id: str, values: Mapping[str, object]) -> Truth | None:
    """Whether what the rule wants holds, or that it does not apply."""
    rule = next(each for each in RULES if each.id == rule_id)
    facts = {path: Fact(path=path, value=value, origin="test") for path, value in values.items()}
    return rule.require.evaluate(facts) if rule.when.evaluate(facts) is Truth.TRUE else NOT_JUDGED


@pytest.mark.parametrize("rule", [rule.id for rule in RULES])
def test_no_rule_applies_to_another_channel_or_to_none(rule: str) -> None:
    for use in (None, "local"):
        values = {**facts_of(["0.0.0.0:9960"] * 2, engine__workers=8), "channel.use": use}
        both = {f"{word}.{path}": value for word in ("one", "other") for path, value in values.items()}
        assert verdict(rule, {**values, **both}) is NOT_JUDGED


def test_a_number_of_workers_that_an_engine_does_not_tell_is_no_pass() -> None:
    ports = ["127.0.0.1:9960", "127.0.0.1:9961"]
    assert verdict("TCP002", facts_of(ports)) is NOT_JUDGED, "there is no engine"
    assert verdict("TCP002", facts_of(ports, engine__block_tokens=128)) is Truth.UNKNOWN
    assert verdict("TCP002", facts_of(["127.0.0.1:0"], engine__block_tokens=128)) is Truth.TRUE
    assert verdict("TCP006", facts_of(ports, ports, engine__block_tokens=128)) is Truth.UNKNOWN
    assert verdict("TCP006", facts_of(ports, engine__workers=2)) is NOT_JUDGED, "nothing is advertised"


def test_what_is_not_known_of_a_channel_is_no_pass() -> None:
    for rule in ("TCP001", "TCP003", "TCP004", "TCP005", "TCP007"):
        assert verdict(rule, {"channel.use": "tcp"}) is Truth.UNKNOWN


@pytest.mark.parametrize(
    ("listen", "secret", "safe"),
    [
        (["127.0.0.1:0"], "", Truth.TRUE),
        (["[::1]:9960", "localhost:9961"], "", Truth.TRUE),
        (["127.0.0.1:0", "10.0.0.1:9960"], "", Truth.FALSE),
        (["elsewhere:9960"], "", Truth.FALSE),
        (["0.0.0.0:0"], "KVFERRY_SECRET", Truth.TRUE),
    ],
)
def test_whoever_listens_beyond_loopback_has_a_secret(listen: list[str], secret: str, safe: Truth) -> None:
    assert verdict("TCP001", {**facts_of(listen), "channel.secret_variable": secret}) is safe


def opens(options: TCPOptions, workers: int) -> bool:
    """Whether every rank finds its own address in what is configured."""
    for rank in range(workers):
        channel = TCPChannel(options)
        try:
            channel.open(
                ChannelContext(
                    name="tcp", instance="test", epoch=os.urandom(16), rank=rank, world_size=workers
                )
            )
        except KVFerryError as error:
            if error.kind is not ErrorKind.CONFIG:
                raise
            return False
        finally:
            channel.close(time.monotonic() + PATIENCE)
    return True


LISTEN = st.lists(st.just("127.0.0.1:0"), min_size=1, max_size=3)
ADVERTISE = st.lists(st.sampled_from(["10.0.0.1:0", "10.0.0.1:9960"]), max_size=3)


@settings(max_examples=40, deadline=None)
@given(LISTEN, ADVERTISE, st.integers(1, 3))
def test_what_the_rules_let_pass_has_an_address_for_every_rank(
    listen: list[str], advertise: list[str], workers: int
) -> None:
    values = facts_of(listen, advertise, engine__workers=workers)
    verdicts = {rule: verdict(rule, values) for rule in ("TCP002", "TCP005", "TCP006")}
    fits = opens(TCPOptions(listen=listen, advertise=advertise), workers)
    if Truth.FALSE not in verdicts.values():
        assert fits
    if Truth.FALSE in (verdicts["TCP002"], verdicts["TCP006"]):
        assert not fits


@given(st.lists(st.sampled_from(["0.0.0.0:0", "0.0.0.0:9960"]), min_size=1, max_size=3), ADVERTISE)
def test_a_port_is_told_only_where_one_is_listened_at(listen: list[str], advertise: list[str]) -> None:
    values = facts_of(listen, advertise)
    if verdict("TCP005", values) is Truth.FALSE:
        return
    ranks = max(len(listen), len(advertise))
    lost = False
    for rank in range(ranks if advertise else 0):
        at = parse_address(listen[rank if len(listen) > 1 else 0])
        told = parse_address(advertise[rank if len(advertise) > 1 else 0])
        lost = lost or (not at.port and bool(told.port))
    assert verdict("TCP007", values) is Truth.of(not lost)


HERE = ("127.0.0.1", "127.0.0.2", "::1", "0.0.0.0", "::", "localhost")


def listened_at(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def both_listened_at(one: str, other: str) -> bool:
    """Whether one port can be had at both. Several are tried: somebody else may have one of them."""
    for _ in range(5):
        with listened_at(one, 0) as first, contextlib.suppress(OSError):
            listened_at(other, first.getsockname()[1]).close()
            return True
    return False


@pytest.mark.parametrize(("one", "other"), [*product(HERE, HERE)])
def test_addresses_are_called_apart_if_both_can_be_listened_at(one: str, other: str) -> None:
    for host in (one, other):
        try:
            listened_at(host, 0).close()
        except OSError as error:
            pytest.skip(f"this machine has no {host}: {error}")
    apart = not Address(one, 9960).excludes(Address(other, 9960))
    # A name may stand for either of two addresses, and is not asked for: it is taken for both.
    if apart or "localhost" not in (one, other):
        assert both_listened_at(one, other) is apart


@given(
    st.sampled_from([*HERE, "10.0.0.1", "fe80::1%a", "fe80::1%b", "host", "HOST"]),
    st.sampled_from([*HERE, "10.0.0.1", "0:0:0:0:0:0:0:1", "fe80::1%a", "fe80::1%b", "host"]),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_whether_addresses_exclude_each_other_depends_on_no_order(
    one: str, other: str, port: int, other_port: int
) -> None:
    excludes = Address(one, port).excludes(Address(other, other_port))
    assert excludes is Address(other, other_port).excludes(Address(one, port))
    if not port or port != other_port:
        assert not excludes
    elif one.lower() == other.lower():
        assert excludes


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("::1", "0:0:0:0:0:0:0:1", True),
        ("host", "HOST", True),
        ("fe80::1%a", "fe80::1%b", False),
        ("host", "10.0.0.1", False),
        ("host", "0.0.0.0", True),
        ("0.0.0.0", "fe80::1%a", False),
        ("::", "10.0.0.1", True),
    ],
)
def test_addresses_are_compared_by_what_they_mean(one: str, other: str, same: bool) -> None:
    assert Address(one, 9960).excludes(Address(other, 9960)) is same


def test_ports_are_compared_within_one_instance_and_between_two() -> None:
    for one, other, apart in (
        ("127.0.0.1:9960", "127.0.0.1:9961", Truth.TRUE),
        ("127.0.0.1:9960", "0.0.0.0:9960", Truth.FALSE),
        ("127.0.0.1:0", "127.0.0.1:0", Truth.TRUE),
    ):
        assert verdict("TCP003", facts_of([one, other])) is apart
        both = {f"one.{path}": value for path, value in facts_of([one]).items()}
        both |= {f"other.{path}": value for path, value in facts_of(["[::1]:1", other]).items()}
        assert verdict("TCP008", both) is apart
