"""Stand-ins: the null ones do nothing, the forwarding ones change nothing, and none lacks a method."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from kvferry import api
from kvferry.data.arena import MemoryFileArena
from kvferry.testing import backends, channels, commands, eviction, keyed_backends, sharing, stagings
from kvferry.testing.faults import FaultPlan
from kvferry.testing.faulty_backend import FaultyBackend

PAIRS: dict[type, tuple[type, type]] = {
    api.Backend: (keyed_backends.NullBackend, keyed_backends.ForwardingBackend),
    api.AddressableBackend: (backends.NullAddressableBackend, backends.ForwardingAddressableBackend),
    api.Arena: (backends.NullArena, backends.ForwardingArena),
    api.EvictionPolicy: (eviction.NullEvictionPolicy, eviction.ForwardingEvictionPolicy),
    api.QuotaPolicy: (eviction.NullQuotaPolicy, eviction.ForwardingQuotaPolicy),
    api.Channel: (channels.NullChannel, channels.ForwardingChannel),
    api.Connection: (channels.NullConnection, channels.ForwardingConnection),
    api.Staging: (stagings.NullStaging, stagings.ForwardingStaging),
    api.PeerDesk: (sharing.NullPeerDesk, sharing.ForwardingPeerDesk),
    api.PeerHost: (sharing.NullPeerHost, sharing.ForwardingPeerHost),
    api.PeerCarrier: (sharing.NullPeerCarrier, sharing.ForwardingPeerCarrier),
    api.Command: (commands.NullCommand, commands.ForwardingCommand),
}


def methods(interface: type) -> dict[str, Callable[..., Any]]:
    return {
        name: function
        for base in interface.__mro__
        for name, function in vars(base).items()
        if inspect.isfunction(function) and not name.startswith("_")
    }


CALLS = [(interface, name) for interface in PAIRS for name in methods(interface)]


class Recorder:
    """Answers every call with a value of its own."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self.calls.append((name, arguments))
            return ("answer", name)

        return call


def test_every_interface_has_its_stand_ins() -> None:
    interfaces = {
        value for name in api.__all__ if getattr(value := getattr(api, name), "_is_protocol", False)
    }
    assert interfaces == set(PAIRS)


@pytest.mark.parametrize(("interface", "name"), CALLS)
def test_a_forwarding_wrapper_passes_everything_on(interface: type, name: str) -> None:
    inner = Recorder()
    _, forwarding = PAIRS[interface]
    count = len(inspect.signature(methods(interface)[name]).parameters) - 1
    arguments = tuple(object() for _ in range(count))
    answer = getattr(forwarding(inner), name)(*arguments)
    assert inner.calls == [(name, arguments)]
    void = inspect.signature(methods(interface)[name]).return_annotation == "None"
    assert answer is None if void else answer == ("answer", name)


@pytest.mark.parametrize(("interface", "name"), CALLS)
def test_a_null_has_every_method_with_the_same_parameters(interface: type, name: str) -> None:
    null, _ = PAIRS[interface]
    own = inspect.signature(methods(null)[name])
    assert own.parameters.keys() == inspect.signature(methods(interface)[name]).parameters.keys()


def test_the_null_backend_finds_nothing_and_takes_nothing() -> None:
    backend = keyed_backends.NullBackend()
    key = api.ChunkKey(bytes(32), bytes(32))
    header = api.ChunkHeader(key=key, parent=None, depth=0, tokens=16, size=8)
    span = api.Span("m", 0, 8)
    assert backend.write([(header, span)], 0.0).results[0].status is api.WriteStatus.NO_SPACE
    assert backend.read([(key, span)], 0.0).results[0].status is api.ReadStatus.MISS
    assert backend.probe([key], 0.0).results[0].status is api.ProbeStatus.ABSENT
    assert backend.delete([key, key], 0.0).results[1].status is api.DeleteStatus.ABSENT
    assert list(backend.recover()) == []


def test_the_null_quota_policy_keeps_quotas_and_gives_nothing_up() -> None:
    policy = eviction.NullQuotaPolicy(default=10)
    policy.set_quota("a", 5)
    assert (policy.quota("a"), policy.quota("b"), policy.quotas()) == (5, 10, {"a": 5})
    policy.set_default_quota(None)
    assert policy.default_quota() is policy.quota("b") is None
    assert [policy.forget_quota("a"), policy.forget_quota("a")] == [True, False]
    assert policy.evict_owned("a", 1, lambda _: api.Claim.TAKEN) == api.NotEnough(0)
    assert policy.evict(1, lambda _: api.Claim.TAKEN) == api.NotEnough(0)


def test_the_null_channel_reaches_nobody() -> None:
    channel = channels.NullChannel()
    with pytest.raises(api.KVFerryError) as caught:
        channel.connect(channel.export(), 0.0)
    assert caught.value.kind is api.ErrorKind.IO
    connection = channels.NullConnection()
    assert (connection.alive, connection.regions()) == (False, {})
    for call in (channel.read, channel.write):
        ticket = call(connection, [api.RemoteOp(api.Span("m", 0, 8), "m", 0)] * 2, 0.0)
        kinds = [result.error and result.error.kind for result in ticket.results]
        assert kinds == [api.ErrorKind.IO] * 2


def test_a_forwarding_connection_is_alive_as_long_as_the_other() -> None:
    class Alive(channels.NullConnection):
        alive = True

    assert not channels.ForwardingConnection(channels.NullConnection()).alive
    assert channels.ForwardingConnection(Alive()).alive


def test_the_null_command_succeeds() -> None:
    command = commands.NullCommand()
    parser = argparse.ArgumentParser()
    command.configure(parser)
    assert command.run(parser.parse_args([])) == 0


def test_wrappers_can_be_layered() -> None:
    inner = keyed_backends.ForwardingBackend(keyed_backends.NullBackend())
    layered = FaultyBackend(keyed_backends.ForwardingBackend(inner), FaultPlan())
    key = api.ChunkKey(bytes(32), bytes(32))
    assert layered.read([(key, api.Span("m", 0, 8))], 0.0).results[0].status is api.ReadStatus.MISS


def test_the_null_peer_has_nothing_and_lends_nothing() -> None:
    host, peer = sharing.NullPeerHost(), api.PeerId("a", bytes(16))
    assert host.desk.ask(peer, api.PeerAsk(number=3, keys=(), limit_tokens=1)) == api.Refused(
        3, api.Refusal.NOTHING
    )
    assert host.desk.renew(peer, 3) == 0.0
    assert host.take_servable(1) == api.ServableChanges()
    assert host.walk_servable(0, 1) == ([], None)

    class Other(sharing.NullPeerHost):
        desk = sharing.NullPeerDesk()

    assert sharing.ForwardingPeerHost(Other()).desk is Other.desk


def test_the_null_staging_has_room_for_nothing() -> None:
    staging = stagings.NullStaging()
    context = api.StagingContext(name="staging", make_arena=MemoryFileArena, regions={})
    assert staging.open(context).length == 0
    ticket = staging.stage([api.StageCopy(api.Span("m", 0, 8), 0)] * 2, 0.0)
    kinds = [result.error and result.error.kind for result in ticket.results]
    assert kinds == [api.ErrorKind.CAPACITY] * 2
