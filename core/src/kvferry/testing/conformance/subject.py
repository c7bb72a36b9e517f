"""What a suite looks at: a plugin, or a spec of it, as core's own loader finds it."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import pytest

from kvferry.api import BackendCapabilities, BackendSpec
from kvferry.plugins import LoadedPlugins, OwnedSpec, PluginRequest, PluginState, load_plugins
from kvferry.testing.conformance.base import Conformance
from kvferry.testing.leaks import LeakGuard

_KINDS = (
    "backend",
    "channel",
    "command",
    "connector",
    "device",
    "eviction",
    "lookup",
    "source",
    "staging",
)


def load_plugin(name: str) -> LoadedPlugins:
    """Load one installed plugin through every gate, or fail the test with the row that says why."""
    plugins = load_plugins([PluginRequest.parse(name, origin="conformance suite")])
    row = next((record for record in plugins.records if record.listed and record.name == name), None)
    if row is None or row.state is not PluginState.READY:
        faults = "\n".join(str(fault) for fault in plugins.faults())
        pytest.fail(f"plugin {name!r} is not usable here:\n{faults}", pytrace=False)
    return plugins


def specs_of(plugins: LoadedPlugins, plugin: str) -> list[OwnedSpec]:
    """Everything that one plugin provides."""
    return [owned for kind in _KINDS for owned in plugins.specs(kind) if owned.plugin.name == plugin]


class BackendSubject(Conformance, kit=True):
    """What the two kinds of backend have in common. ``plugin`` and ``backend`` are the names that a
    configuration uses: ``plugins: [plugin]`` and ``use: backend``."""

    plugin: ClassVar[str]
    backend: ClassVar[str]
    capacity: ClassVar[int] = 4 << 20
    """Bytes. Some laws fill a tier of this size."""
    patience: ClassVar[float] = 60.0
    """Seconds after which something that should end is taken for hanging."""

    @pytest.fixture
    def plugins(self) -> LoadedPlugins:
        """The plugin, loaded as core does it."""
        return load_plugin(self.plugin)

    @pytest.fixture
    def spec(self, plugins: LoadedPlugins) -> BackendSpec:
        """The description that is put to the proof."""
        return plugins.backend(self.backend)

    @pytest.fixture
    def claims(self, spec: BackendSpec) -> frozenset[str]:
        """Names of the capabilities that the spec claims."""
        claimed = attrs.asdict(spec.capabilities)
        return frozenset(name for name, value in claimed.items() if value not in (False, None))

    @pytest.fixture
    def options(self, plugins: LoadedPlugins) -> Any:
        """The backend's options. The defaults; override it to give others, such as a folder."""
        options_class = plugins.options_class("backend", self.backend)
        assert options_class is not None
        return options_class()

    def test_claims_do_not_contradict_each_other(self, spec: BackendSpec) -> None:
        """What a spec claims can be true at the same time."""
        claims: BackendCapabilities = spec.capabilities
        limit = claims.max_value_bytes
        assert limit is None or limit > 0, "max_value_bytes allows no value"
        if claims.addressable:
            by_key = claims.persistent or claims.shared or limit is not None
            assert not by_key, (
                "an addressable backend has no keys that could outlive it, be shared or refused"
            )
        else:
            assert not claims.servable_to_peers, (
                "peers are served from plain memory, so addressable is needed"
            )

    def test_the_options_are_of_the_spec_s_class(self, plugins: LoadedPlugins, options: object) -> None:
        """The options are what core would make of the tier's section."""
        options_class = plugins.options_class("backend", self.backend)
        assert options_class is not None
        assert isinstance(options, options_class), "the options fixture gives something else"

    def test_making_a_backend_has_no_effect(self, plugins: LoadedPlugins, options: object) -> None:
        """The constructor keeps values; threads, files and memory come with ``open``."""
        factory = plugins.factory("backend", self.backend)  # importing may leave what it likes
        guard = LeakGuard()
        kept = [factory(options, self.capacity) for _ in range(3)]
        assert guard.leaks(settle_seconds=0.0) == []
        del kept
