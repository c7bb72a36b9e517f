"""Engines that find each other through a controller and read each other's memory, over real sockets."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
import zmq

from kvferry.api import PeerId
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import (
    FakeInstance,
    InstanceSettings,
    SharingFake,
    open_fake_instance,
    wait_until,
)
from kvferry.testing.fake_memory import FakeGroup
from kvferry_sharing_p2p.controller.server import ControllerServer
from kvferry_sharing_p2p.directory.answers import DirectoryOptions
from kvferry_sharing_p2p.directory.desk import Desk
from kvferry_sharing_p2p.directory.publisher import Identity, PublisherOptions
from kvferry_sharing_p2p.directory.state import Directory
from kvferry_sharing_p2p.network.client import DirectoryClient
from kvferry_sharing_p2p.network.endpoint import Endpoint
from kvferry_sharing_p2p.network.secret import SharedSecret
from kvferry_sharing_p2p.peers.carrier import CarrierSettings, PeerNetworkCarrier
from kvferry_transport_tcp.channel import TCPChannel
from kvferry_transport_tcp.options import TCPOptions

CHUNK = 16
LOOPBACK = Endpoint("127.0.0.1", 0)
SECRET = SharedSecret(b"thirty-two letters are a secret!")


def prompt(number: int, tokens: int = 4 * CHUNK + 3) -> list[int]:
    return [1000 * number + token for token in range(tokens)]


class World:
    def __init__(self, folder: Path, stack: ExitStack, secret: SharedSecret | None) -> None:
        self.folder = folder
        self.stack = stack
        self.secret = secret
        self.start_controller(LOOPBACK)
        stack.callback(lambda: self.server.close())

    def start_controller(self, listen: Endpoint) -> None:
        directory = Directory(DirectoryOptions(), os.urandom(16), time.monotonic())
        self.server = ControllerServer(
            Desk(directory), listen, self.secret, clock=time.monotonic, on_failed=lambda: None
        )
        self.controller = self.server.open()

    def open(
        self,
        name: str,
        *,
        world_size: int = 1,
        groups: tuple[FakeGroup, ...] = (FakeGroup(),),
        **settings: Any,
    ) -> FakeInstance:
        carrier = PeerNetworkCarrier(
            CarrierSettings(
                listen=LOOPBACK,
                controller=self.controller,
                secret=self.secret,
                publisher=PublisherOptions(batch_seconds=0.01),
            ),
            clock=time.monotonic,
            random=os.urandom,
        )
        sharing = SharingFake(
            id=PeerId(name, os.urandom(16)),
            carrier=carrier,
            make_channel=lambda: TCPChannel(TCPOptions()),
            settings=settings,
        )
        made = InstanceSettings(
            engine=EngineSettings(),
            world_size=world_size,
            groups=groups,
            engine_id=name,
            sharing=sharing,
        )
        instance = self.stack.enter_context(open_fake_instance(self.folder, made))
        wait_until(lambda: name in self.told(), 20.0, f"{name} never came to the directory")
        return instance

    def told(self) -> dict[str, int]:
        """How many keys the directory has of each."""
        status = self.server.status(5.0)
        assert status is not None
        return {each.instance: each.keys for each in status.status.instances}

    def settle(self, *instances: FakeInstance) -> None:
        for instance in instances:
            instance.settle_lower()
            sharing = instance.scheduler.sharing
            assert sharing is not None
            wait_until(lambda sharing=sharing: sharing.serving.leases == 0, 20.0, "leases of peers")  # type: ignore[misc]
            instance.check_idle()


@pytest.fixture(params=[None, SECRET], ids=["in the clear", "with a secret"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    # A short path: sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="kvf") as folder, ExitStack() as stack:
        yield World(Path(folder), stack, request.param)


def serve(instance: FakeInstance, tokens: list[int]) -> list[int]:
    """What the request hit. The engine compares every byte that it reads."""
    request = instance.engine.add(tokens)
    instance.engine.run()
    instance.settle_lower()
    return request.hits


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_one_engine_computed_another_one_loads(world: World, world_size: int) -> None:
    near, far = world.open("near", world_size=world_size), world.open("far", world_size=world_size)
    tokens = prompt(1, 4 * CHUNK + 1)
    assert serve(far, tokens) == []
    wait_until(lambda: world.told()["far"] == 4, 20.0, "keys that never came")
    assert serve(near, tokens) == [4 * CHUNK]
    wait_until(lambda: world.told()["near"] == 4, 20.0, "keys that never came")
    world.settle(near, far)


def test_without_the_controller_nothing_is_found_and_with_its_successor_everything(world: World) -> None:
    near, far = world.open("near"), world.open("far")
    serve(far, prompt(1, 4 * CHUNK + 1))
    wait_until(lambda: world.told()["far"] == 4, 20.0, "keys that never came")
    world.server.close()
    assert serve(near, prompt(1, 4 * CHUNK + 1)) == []
    serve(far, prompt(2, 4 * CHUNK + 1))
    world.start_controller(world.controller)
    wait_until(lambda: world.told().get("far") == 8, 20.0, "keys that never came again")
    assert serve(near, prompt(2, 4 * CHUNK + 1)) == [4 * CHUNK]
    world.settle(near, far)


def test_an_instance_that_started_anew_is_found_anew(world: World) -> None:
    near = world.open("near", pause_seconds=0.05)
    with ExitStack() as stack:
        before, world.stack = world.stack, stack
        far = world.open("far")
        world.stack = before
        serve(far, prompt(1, 4 * CHUNK + 1))
        wait_until(lambda: world.told()["far"] == 4, 20.0, "keys that never came")
        assert serve(near, prompt(1, 4 * CHUNK + 1)) == [4 * CHUNK]
    wait_until(lambda: "far" not in world.told(), 20.0, "an instance that never left")
    again = world.open("far")
    serve(again, prompt(2, 4 * CHUNK + 1))
    wait_until(lambda: world.told()["far"] == 4, 20.0, "keys that never came")
    assert serve(near, prompt(2, 4 * CHUNK + 1)) == [4 * CHUNK]
    world.settle(near, again)


@pytest.mark.parametrize(
    ("other", "told"),
    [({"world_size": 2}, "P2P026"), ({"groups": (FakeGroup(fused=False),)}, "P2P027")],
)
def test_nothing_is_read_from_who_holds_it_otherwise_and_the_log_says_in_what(
    world: World, other: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = world.open("near", load_deadline=20.0), world.open("far", **other)
    serve(far, prompt(1, 4 * CHUNK + 1))
    wait_until(lambda: world.told()["far"] == 4, 20.0, "keys that never came")
    assert serve(near, prompt(1, 4 * CHUNK + 1)) == []
    said = [record.message for record in caplog.records if "nothing is read from" in record.message]
    assert len(said) == 1
    assert "instance far" in said[0]
    assert told in said[0]
    # With all others it goes on as before.
    like = world.open("like")
    serve(like, prompt(2, 4 * CHUNK + 1))
    wait_until(lambda: world.told()["like"] == 4, 20.0, "keys that never came")
    assert serve(near, prompt(2, 4 * CHUNK + 1)) == [4 * CHUNK]
    world.settle(near, far, like)


class Liar:
    """Claims to have every key it is told of, and answers whoever comes with what is no message."""

    def __init__(self, world: World, digests: bytes) -> None:
        self._digests = digests
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        identity = Identity(
            instance="liar",
            epoch=os.urandom(16),
            namespace=b"fake".ljust(32, b"\x00"),
            ranks=1,
            address=f"tcp://127.0.0.1:{port}".encode(),
        )
        options = PublisherOptions(batch_seconds=0.01)
        self._client = DirectoryClient(
            world.controller, None, identity, self, options, clock=time.monotonic, random=os.urandom
        )

    def walk(self, cursor: int, limit: int) -> tuple[bytes, int | None]:
        """For the directory."""
        return self._digests, None

    def __enter__(self) -> Self:
        self._client.open()
        return self

    def answer(self, frames: Sequence[bytes], seconds: float) -> None:
        """To the next who says something."""
        assert self._socket.poll(int(1000 * seconds)), "nobody came"
        connection = self._socket.recv_multipart()[0]
        for frame in frames:
            self._socket.send_multipart([connection, frame])

    def __exit__(self, *_: object) -> None:
        self._client.close(time.monotonic() + 10.0)
        self._socket.close()
        self._context.term()


@pytest.mark.parametrize("world", [None], indirect=True, ids=["in the clear"])
def test_a_peer_that_answers_with_garbage_is_parted_with_and_no_other(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = world.open("near", load_deadline=20.0, pause_seconds=0.05), world.open("far")
    answers = ([b""], [b"\xc1"] * 3, [os.urandom(500)], [b"\x81"], [b"x" * (17 << 20)])
    digests = b""
    for number in range(len(answers)):
        chain = near.new_chain("", None)
        chain.extend(prompt(10 + number, 4 * CHUNK + 1))
        digests += b"".join(chain.keys[:4])
    with Liar(world, digests) as liar:
        wait_until(lambda: world.told().get("liar", 0) == 4 * len(answers), 20.0, "keys that never came")
        for number, frames in enumerate(answers):
            request = near.engine.add(prompt(10 + number, 4 * CHUNK + 1))
            near.engine.step()
            liar.answer(frames, 20.0)
            near.engine.run()
            near.settle_lower()
            assert request.hits == []
            time.sleep(0.1)  # the pause after a failure
    serve(far, prompt(2, 4 * CHUNK + 1))
    wait_until(lambda: world.told()["far"] == 4, 20.0, "keys that never came")
    assert serve(near, prompt(2, 4 * CHUNK + 1)) == [4 * CHUNK]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    world.settle(near, far)
