"""How the laws of channels get at channels, their memory and their peers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import attrs
import pytest
from attrs import define, evolve, field

from kvferry.api import Channel, ChannelCapabilities, ChannelContext, ChannelSpec, MemoryKind
from kvferry.data.mapping import MappedRegion, create_region
from kvferry.plugins import LoadedPlugins
from kvferry.testing.conformance.base import Conformance
from kvferry.testing.conformance.channel_driver import Side, Way
from kvferry.testing.conformance.subject import load_plugin
from kvferry.testing.guarded import MEMORY, side_memory
from kvferry.testing.leaks import LeakGuard

MEMORY_BYTES = 40 << 20
"""Of every side; most of it is never touched."""

LEAST_REGISTERED = 48 << 20
"""What a channel with ``max_registered_bytes`` has to take, for the laws to have room."""


def claimed(capabilities: ChannelCapabilities) -> frozenset[str]:
    """Names of the capabilities; ``register_after_connect`` is the absence of ``register_before_connect``."""
    values = attrs.asdict(capabilities, recurse=False)
    names = {name for name, value in values.items() if value not in (False, None)}
    return frozenset(names if "register_before_connect" in names else {*names, "register_after_connect"})


@define
class Workbench:
    """Opens channels, and closes all of them at the end."""

    make_channel: Callable[[], Channel]
    capabilities: ChannelCapabilities
    patience: float = 30.0
    grace: float = 5.0
    subject: str = ""
    sides: list[Side] = field(factory=list)
    files: list[MappedRegion] = field(factory=list)
    """Memory files of sides."""

    @property
    def verbs(self) -> tuple[str, ...]:
        """What the channel claims to do."""
        claims = self.capabilities
        return tuple(verb for verb, able in (("read", claims.read), ("write", claims.write)) if able)

    @property
    def limit(self) -> int:
        """How many operations the laws put into one call, but for the one that puts in all it can."""
        return min(self.most, 512)

    @property
    def most(self) -> int:
        """How many operations one call takes; where nothing limits them, as many as is worth trying."""
        return self.capabilities.max_ops or 4096

    def context(self, **facts: Any) -> ChannelContext:
        """A context as core would hand it out; every one is an epoch of its own."""
        base = ChannelContext(
            name="channel",
            instance=f"instance-{len(self.sides)}",
            epoch=os.urandom(16),
            clock=time.monotonic,
            variables=dict(os.environ),
        )
        return evolve(base, **facts)

    def make(self, **facts: Any) -> Side:
        """A channel that is not open yet."""
        number = len(self.sides)
        memory = side_memory(self.memory_bytes, number)
        side = Side(self.make_channel(), self.context(**facts), memory, self.patience)
        self.sides.append(side)
        return side

    @property
    def memory_bytes(self) -> int:
        """As much as the laws want, or half of what may be registered."""
        limit = self.capabilities.max_registered_bytes
        return MEMORY_BYTES if limit is None else min(MEMORY_BYTES, limit // 2)

    def open_bare(self, **facts: Any) -> Side:
        """An open channel that has registered nothing."""
        side = self.make(**facts)
        side.channel.open(side.context)
        return side

    def open(self, *, memory_file: bool = False, **facts: Any) -> Side:
        """An open channel that has registered its memory."""
        side = self.open_bare(**facts)
        if memory_file:
            mapped = create_region(MEMORY, self.memory_bytes)
            self.files.append(mapped)
            side.memory = side_memory(self.memory_bytes, self.sides.index(side), mapped.region)
        side.channel.register(side.memory.region)
        return side

    def way(self, near: Side, far: Side) -> Way:
        return Way.between(near, far, near.connect(far))

    def pair(self, *, memory_file: bool = False) -> Way:
        """Two open sides, and the way from the one to the other."""
        near, far = self.open(memory_file=memory_file), self.open(memory_file=memory_file)
        return self.way(near, far)

    def close_all(self) -> None:
        for side in self.sides:
            side.close()
        while self.files:
            self.files.pop().close()

    def end(self) -> None:
        """Close every side; nothing may have been touched or completed that must not."""
        for side in self.sides:
            side.close()
        found = [text for side in self.sides for text in side.trespasses()]
        self.close_all()
        assert found == []


class ChannelSubject(Conformance, kit=True):
    """Fixtures of :class:`kvferry.testing.conformance.ChannelConformance`. ``plugin`` and ``channel`` are the
    names that a configuration uses: ``plugins: [plugin]`` and ``channel: {use: channel}``."""

    plugin: ClassVar[str]
    channel: ClassVar[str]
    subject: ClassVar[str] = ""
    """Import path ``package.module:make`` of a function without parameters that makes a closed channel with
    the same options, for peers in processes of their own; its module should import little, because many are
    started. Without it the laws about such peers count as not claimed."""
    patience: ClassVar[float] = 30.0
    """Seconds after which something that should end is taken for hanging."""
    grace: ClassVar[float] = 5.0
    """Seconds that are soon, after a deadline or a peer's death."""

    @pytest.fixture
    def plugins(self) -> LoadedPlugins:
        """The plugin, loaded as core does it."""
        return load_plugin(self.plugin)

    @pytest.fixture
    def spec(self, plugins: LoadedPlugins) -> ChannelSpec:
        """The description that is put to the proof."""
        return plugins.channel(self.channel)

    @pytest.fixture
    def claims(self, spec: ChannelSpec) -> frozenset[str]:
        """Names of the capabilities that the spec claims, and ``subject`` if the author gives one."""
        return claimed(spec.capabilities) | ({"subject"} if self.subject else set())

    @pytest.fixture
    def options(self, plugins: LoadedPlugins) -> Any:
        """The channel's options. The defaults; override it to give others."""
        options_class = plugins.options_class("channel", self.channel)
        assert options_class is not None
        return options_class()

    @pytest.fixture
    def make_channel(self, plugins: LoadedPlugins, options: Any) -> Callable[[], Channel]:
        """Makes a closed channel, as core does it."""
        factory = plugins.factory("channel", self.channel)
        return lambda: factory(options)

    @pytest.fixture
    def bench(self, make_channel: Callable[[], Channel], spec: ChannelSpec) -> Iterator[Workbench]:
        """Whatever is opened through it is closed at the end of the test."""
        bench = Workbench(make_channel, spec.capabilities, self.patience, self.grace, self.subject)
        yield bench
        bench.close_all()

    def test_claims_do_not_contradict_each_other(self, spec: ChannelSpec) -> None:
        """What a spec claims can be true at the same time."""
        claims = spec.capabilities
        assert claims.read or claims.write, "a channel that neither reads nor writes moves nothing"
        assert claims.memory, "no kind of memory can be registered"
        assert MemoryKind.HOST in claims.memory, "the kit proves channels for host memory alone"
        assert claims.max_ops is None or claims.max_ops > 0, "max_ops allows no operation"
        limit = claims.max_registered_bytes
        assert limit is None or limit >= LEAST_REGISTERED, (
            f"max_registered_bytes is {limit}, and the laws need {LEAST_REGISTERED}"
        )

    def test_the_options_are_of_the_spec_s_class(self, plugins: LoadedPlugins, options: object) -> None:
        """The options are what core would make of the section."""
        options_class = plugins.options_class("channel", self.channel)
        assert options_class is not None
        assert isinstance(options, options_class), "the options fixture gives something else"

    def test_making_a_channel_has_no_effect(self, make_channel: Callable[[], Channel]) -> None:
        """The constructor keeps values; threads, sockets and memory come with ``open``."""
        make_channel()  # importing may leave what it likes
        guard = LeakGuard()
        kept = [make_channel() for _ in range(3)]
        assert guard.leaks(settle_seconds=0.0) == []
        del kept
