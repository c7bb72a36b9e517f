"""What a plugin says about itself: frozen descriptions, read before any implementation is imported.

Every ``factory`` and ``options`` is an import string ``package.module:attribute``. Core resolves it
only when a configuration selects the spec by name, so that a plugin which is installed but not used
costs nothing.
"""

from __future__ import annotations

from attrs import field, frozen

from kvferry.api.memory import MemoryKind


@frozen(kw_only=True)
class Manifest:
    """The first thing core reads of a plugin's entry module, as its attribute ``MANIFEST``."""

    name: str
    """Plugin name; equals the entry-point name in group ``kvferry.plugins``."""
    api: str
    """Range of contract versions (PEP 440 specifiers, for example ``>=1.0,<2``)."""
    rule_prefix: str
    """Prefix of the compatibility rules this plugin owns, upper-case, for example ``CPU``."""
    summary: str = ""
    docs: str = ""


@frozen(kw_only=True)
class BackendCapabilities:
    """Claims about a backend. Core enforces each one; the conformance kit proves it."""

    addressable: bool = False
    """Provides regions in which core allocates slots; otherwise reads and writes by key."""
    persistent: bool = False
    """Chunks outlive the process."""
    shared: bool = False
    """Several instances may use the same store."""
    servable_to_peers: bool = False
    """A channel may read a chunk directly from this tier."""
    needs_host_buffer: bool = False
    """Cannot read into or write from device memory."""
    max_value_bytes: int | None = None


@frozen(kw_only=True)
class BackendSpec:
    """The data half of a tier."""

    name: str
    factory: str
    """Class with the shape of :class:`kvferry.api.AddressableBackend` or ``Backend``."""
    options: str
    """attrs class of this backend's own keys in the tier's section."""
    capabilities: BackendCapabilities
    summary: str = ""


@frozen(kw_only=True)
class EvictionSpec:
    """An eviction policy; the object is built in the control plane."""

    name: str
    factory: str
    """Class with the shape of :class:`kvferry.api.EvictionPolicy`."""
    options: str | None = None
    quotas: bool = False
    """Keeps owners apart: has the shape of :class:`kvferry.api.QuotaPolicy`."""
    summary: str = ""


@frozen(kw_only=True)
class ConnectorSpec:
    """A host integration. Connectors drive ``kvferry.runtime``; they are not tiers."""

    name: str
    options: str
    """attrs class of the ``connector:`` section."""
    summary: str = ""


@frozen(kw_only=True)
class DeviceSpec:
    """An accelerator whose memory holds the engine's KV cache. Host memory is built in."""

    name: str
    factory: str
    summary: str = ""


@frozen(kw_only=True)
class CommandSpec:
    """A subcommand of ``kvferry``."""

    name: str
    factory: str
    """Class with the shape of :class:`kvferry.api.Command`."""
    summary: str


@frozen(kw_only=True)
class ChannelCapabilities:
    """Claims about a channel. Core enforces each one; the conformance kit proves it."""

    memory: frozenset[MemoryKind] = frozenset({MemoryKind.HOST})
    """What kinds of regions can be registered."""
    read: bool = True
    """One-sided reads."""
    write: bool = True
    """One-sided writes."""
    register_before_connect: bool = False
    """A peer sees only the regions that were registered before it connected."""
    same_host: bool = False
    """Reaches peers on this machine alone."""
    max_ops: int | None = None
    """How many operations one call takes; core cuts longer lists."""
    max_registered_bytes: int | None = None
    """How much memory can be registered together; ``None`` where only the system limits it."""
    reconnect: bool = True
    """A peer that comes back in a new epoch can be connected to without opening the channel again."""
    staging: bool = True
    """May work out of a staging arena, in place of whole tiers."""


@frozen(kw_only=True)
class ChannelSpec:
    """A channel that moves spans between arenas of two data planes."""

    name: str
    factory: str
    """Class with the shape of :class:`kvferry.api.Channel`."""
    options: str
    """attrs class of the keys of the section ``channel:``, beside ``use``."""
    capabilities: ChannelCapabilities = ChannelCapabilities()
    summary: str = ""


@frozen(kw_only=True)
class LookupSpec:
    """A directory that says which instance has which keys."""

    name: str
    factory: str
    options: str
    summary: str = ""


@frozen(kw_only=True)
class StagingSpec:
    """A bounded registered arena between a tier and a channel."""

    name: str
    factory: str
    """Class with the shape of :class:`kvferry.api.Staging`."""
    options: str
    """attrs class of the keys of the section ``staging:``, beside core's."""
    summary: str = ""


@frozen(kw_only=True)
class SourceSpec:
    """A place outside this instance where chunks may come from."""

    name: str
    factory: str
    options: str
    summary: str = ""


AnySpec = (
    BackendSpec
    | EvictionSpec
    | ConnectorSpec
    | DeviceSpec
    | CommandSpec
    | ChannelSpec
    | LookupSpec
    | StagingSpec
    | SourceSpec
)


@frozen(kw_only=True)
class HostEnvironment:
    """What fact probes may look at. Handed in, so that a test can describe another machine."""

    variables: dict[str, str] = field(factory=dict)
    root: str = "/"
    """Where the file system starts; tests point it at a folder of their own."""
