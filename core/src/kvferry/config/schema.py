"""What core itself can be told. Keys of plugins are not here: their options classes hold those."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import ClassVar, NewType

from attrs import Attribute, field, frozen
from attrs.validators import optional

from kvferry.api import (
    BackendSpec,
    ChannelSpec,
    ConnectorSpec,
    EvictionSpec,
    Fact,
    LookupSpec,
    SourceSpec,
    StagingSpec,
)
from kvferry.api.units import ByteSize, Duration
from kvferry.config.fields import (
    UNIT_KINDS,
    TextKind,
    TextKinds,
    Unacceptable,
    computed,
    not_blank,
    not_negative,
    origin,
    own_keys,
    plain_name,
    positive,
    share,
    socket_folder,
)
from kvferry.config.flow import flow_text
from kvferry.config.leaves import HIDDEN, Leaf
from kvferry.config.places import place_facts, sharing_facts

TierName = NewType("TierName", str)
"""Lower-case letters, digits, ``_`` and ``-``, so that variables and dotted names can reach it."""
RuleId = NewType("RuleId", str)
"""Id of a compatibility rule, upper-case; written in any letter case."""
Reason = NewType("Reason", str)
"""Text with something to read in it."""


DEFAULT_INSTANCE = "kvferry"
"""What an instance without a name of its own is called in the stores of persistent tiers."""


class OnError(enum.Enum):
    """What a plugin that cannot be loaded means for the instance."""

    FAIL = "fail"
    SKIP = "skip"


@frozen(kw_only=True)
class PluginEntry:
    """A plugin to load. Short spellings: ``name`` and ``name@distribution``."""

    short_spelling: ClassVar[str] = "the plugin's name"
    name_key: ClassVar[str] = "name"

    name: str = field(metadata={"doc": "name of the plugin"})
    distribution: str | None = field(
        default=None,
        validator=not_blank,
        metadata={"doc": "which distribution, where two offer the same name"},
    )
    on_error: OnError = field(
        default=OnError.FAIL, metadata={"doc": "whether the instance starts without it"}
    )
    origin: str = origin()

    @name.validator
    def _check_name(self, attribute: Attribute[str], value: str) -> None:
        not_blank(self, attribute, value)
        if "@" in value:
            raise Unacceptable(
                "names a distribution although 'distribution' does, too", remedy="remove one of the two"
            )


@frozen(kw_only=True)
class Eviction:
    """How a tier makes room. Short spelling: the policy's name."""

    short_spelling: ClassVar[str] = "the policy's name"

    use: str = field(default="lru", metadata={"doc": "name of the eviction policy"})
    options: object = own_keys(EvictionSpec)
    origin: str = origin()


class StoreWhen(enum.Enum):
    """When chunks are copied down to a lower tier."""

    WRITE_THROUGH = "write_through"
    """As soon as they are in the first tier."""
    WRITE_ON_EVICT = "write_on_evict"
    """When the first tier would drop them to make room."""


class LandOn(enum.Enum):
    """Where what is read from peers arrives."""

    HOST = "host"
    """In the first tier."""
    DEVICE = "device"
    """In memory of the kind that the engine computes in, and from there in its blocks."""


@frozen(kw_only=True)
class Tier:
    """A configured use of a backend. All behind the first are lower tiers."""

    use: str = field(metadata={"doc": "name of the backend"})
    capacity: ByteSize = field(
        validator=positive, metadata={"doc": "how much the tier may hold, such as 16GiB"}
    )
    eviction: Eviction = field(factory=Eviction, metadata={"doc": "how the tier makes room"})
    ttl: Duration | None = field(
        default=None,
        validator=optional(positive),
        metadata={"doc": "how long chunks live whose request asks for no time of its own, such as 12h"},
    )
    max_pinned: float = field(
        default=0.5,
        validator=share,
        metadata={"doc": "first tier: how much of it requests may pin, from 0 (nothing) to 1 (all of it)"},
    )
    store: StoreWhen = field(
        default=StoreWhen.WRITE_THROUGH,
        metadata={"doc": "lower tier: when chunks are copied down, at once or as the first tier drops them"},
    )
    in_flight: ByteSize = field(
        default=ByteSize(256 << 20),
        validator=positive,
        metadata={
            "doc": "lower tier: memory of the first tier that copies down may hold at once; as much again "
            "for loads"
        },
    )
    load_deadline: Duration = field(
        default=Duration(5.0),
        validator=positive,
        metadata={"doc": "lower tier: how long a request waits for its chunks before they are computed"},
    )
    store_deadline: Duration = field(
        default=Duration(30.0),
        validator=positive,
        metadata={"doc": "lower tier: how long one copy down may take"},
    )
    min_load_tokens: int = field(
        default=0,
        validator=not_negative,
        metadata={"doc": "lower tier: hits of fewer tokens are computed instead; 0 loads every hit"},
    )
    retry_after: Duration = field(
        default=Duration(30.0),
        validator=positive,
        metadata={"doc": "lower tier: pause after which a tier that failed is opened again"},
    )
    options: object = own_keys(BackendSpec)
    origin: str = origin()


@frozen(kw_only=True)
class Connector:
    """The host integration. The host knows which connector it is, so ``use`` may be left out."""

    use: str | None = field(default=None, metadata={"doc": "name of the connector"})
    options: object = own_keys(ConnectorSpec)
    origin: str = origin()


@frozen(kw_only=True)
class Channel:
    """How bytes travel between the memories of instances. Without ``use`` there is no channel."""

    use: str | None = field(default=None, metadata={"doc": "name of the channel"})
    options: object = own_keys(ChannelSpec)
    origin: str = origin()


@frozen(kw_only=True)
class Lookup:
    """Where it is asked which instance has which chunks. Without ``use`` nobody is asked."""

    use: str | None = field(default=None, metadata={"doc": "name of the directory"})
    options: object = own_keys(LookupSpec)
    origin: str = origin()


@frozen(kw_only=True)
class Sharing:
    """Reads between instances. Without ``use`` nothing is shared."""

    use: str | None = field(default=None, metadata={"doc": "name of the source of peers' chunks"})
    pull: bool = field(
        default=True,
        metadata={"doc": "whoever needs chunks reads them out of its peer's memory; the one way there is"},
    )
    delay: bool = field(
        default=False,
        metadata={
            "doc": "read while the engine's blocks are filled, not before; false reads into the first tier"
        },
    )
    land_on: LandOn = field(
        default=LandOn.HOST,
        metadata={"doc": "memory in which reads arrive: host is the first tier's, device the engine's kind"},
    )
    buffer: ByteSize = field(
        default=ByteSize(128 << 20),
        validator=positive,
        metadata={"doc": "memory per rank that reads pass through, as two halves in turns, where they do"},
    )
    keep: bool = field(
        default=True,
        metadata={"doc": "whether the first tier stores what was read from peers, too"},
    )
    load_deadline: Duration = field(
        default=Duration(5.0),
        validator=positive,
        metadata={"doc": "how long a request waits for what peers have before it is computed"},
    )
    min_load_tokens: int = field(
        default=0,
        validator=not_negative,
        metadata={"doc": "hits of fewer tokens at peers are computed instead; 0 loads every hit"},
    )
    in_flight: ByteSize = field(
        default=ByteSize(256 << 20),
        validator=positive,
        metadata={"doc": "memory of the first tier that reads from one peer may hold at once"},
    )
    lease: Duration = field(
        default=Duration(30.0),
        validator=positive,
        metadata={"doc": "how long peers may read what they were lent before they have to ask again"},
    )
    guard: Duration = field(
        default=Duration(1.0),
        validator=positive,
        metadata={"doc": "how long before the end of a lease nothing is read any more"},
    )
    max_lent: float = field(
        default=0.25,
        validator=share,
        metadata={"doc": "how much of the first tier peers may be lent, from 0 to 1"},
    )
    pause: Duration = field(
        default=Duration(10.0),
        validator=positive,
        metadata={"doc": "how long a peer that failed is asked nothing"},
    )
    options: object = own_keys(SourceSpec)
    origin: str = origin()


@frozen(kw_only=True)
class Staging:
    """Memory between the first tier and a channel that cannot register the whole of it. Without ``use``
    peers read the first tier itself."""

    use: str | None = field(default=None, metadata={"doc": "name of the staging"})
    capacity: ByteSize = field(
        default=ByteSize(1 << 30),
        validator=positive,
        metadata={"doc": "memory per rank; what peers read at once has to fit in it"},
    )
    options: object = own_keys(StagingSpec)
    origin: str = origin()


@frozen(kw_only=True)
class Config:
    """A whole configuration without faults. Immutable; may be read from any thread."""

    plugins: tuple[PluginEntry, ...] = field(default=(), metadata={"doc": "plugins to load, in this order"})
    chunk_tokens: int = field(default=256, validator=positive, metadata={"doc": "tokens that one key covers"})
    instance: str | None = field(
        default=None, validator=plain_name, metadata={"doc": "name of this instance among its peers"}
    )
    model_identity: str | None = field(
        default=None,
        validator=not_blank,
        metadata={"doc": "takes the place of the model's own identity in keys"},
    )
    runtime_dir: str | None = field(
        default=None, validator=socket_folder, metadata={"doc": "folder for sockets of this host"}
    )
    tiers: Mapping[TierName, Tier] = field(factory=dict, metadata={"doc": "tiers by name, fast to slow"})
    connector: Connector = field(factory=Connector, metadata={"doc": "the host integration"})
    channel: Channel = field(
        factory=Channel, metadata={"doc": "how bytes travel between the memories of instances"}
    )
    lookup: Lookup = field(factory=Lookup, metadata={"doc": "the directory that says who has which chunks"})
    p2p: Sharing = field(factory=Sharing, metadata={"doc": "reads between instances"})
    staging: Staging = field(
        factory=Staging, metadata={"doc": "memory that peers read in place of the first tier"}
    )
    waive: Mapping[RuleId, Reason] = field(
        factory=dict, metadata={"doc": "compatibility rules to ignore, each with its reason"}
    )
    leaves: tuple[Leaf, ...] = computed(())
    """Every value with its path and origin, in the order of the schema."""

    def facts(self) -> Mapping[str, Fact]:
        """Every value as a fact by its dotted path. A secret's value is ``***``, or None if unset.

        A mapping of plain values is a fact as well, in one piece: its keys are the user's and may hold
        dots, so that no path reaches them for certain. Beside a tier's keys stand two facts below
        ``place``: whether it is the first, and which of its keys do nothing there. Below ``sharing`` stands
        what memory sharing takes.
        """
        facts: dict[str, Fact] = {}
        for leaf in self.leaves:
            path = ".".join(leaf.path)
            hidden = leaf.secret and leaf.value is not None
            value = HIDDEN if hidden else leaf.value
            written = HIDDEN if hidden else flow_text(leaf.written)
            fact = Fact(path=path, value=value, origin=leaf.origin, written=written)
            if leaf.in_mapping:
                whole = ".".join(leaf.path[:-1])
                facts[whole] = _extended(facts.get(whole), whole, leaf.path[-1], fact)
            facts[path] = fact
        tiers = dict.fromkeys(
            leaf.path[1] for leaf in self.leaves if leaf.path[0] == "tiers" != leaf.path[-1]
        )
        facts.update({fact.path: fact for fact in place_facts(tiers, facts)})
        facts.update({fact.path: fact for fact in sharing_facts(facts)})
        return facts


def _extended(before: Fact | None, path: str, key: str, item: Fact) -> Fact:
    """The mapping at ``path`` with one key more."""
    written = f"{flow_text(key)}: {item.written}"
    if before is None:
        return Fact(path=path, value={key: item.value}, origin=item.origin, written=f"{{{written}}}")
    origins = dict.fromkeys((*before.origin.split(", "), item.origin))
    return Fact(
        path=path,
        value={**before.value, key: item.value},
        origin=", ".join(origins),
        written=f"{before.written[:-1]}, {written}}}",
    )


def _parse_tier_name(text: str) -> TierName:
    if re.fullmatch(r"[a-z0-9]+(?:[_-][a-z0-9]+)*", text) is None:
        raise ValueError("a tier's name is made of a-z, 0-9 and single '_' or '-' inside")
    return TierName(text)


def _parse_rule_id(text: str) -> RuleId:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", text) is None:
        raise ValueError("not the id of a rule, such as CPU001")
    return RuleId(text.upper())


def _parse_reason(text: str) -> Reason:
    if not text.strip():
        raise ValueError("a waiver needs a reason")
    return Reason(text)


TEXT_KINDS: TextKinds = {
    **UNIT_KINDS,
    TierName: TextKind(
        parse=_parse_tier_name, expected="a tier's name", remedy="rename it, for example ssd_2"
    ),
    RuleId: TextKind(parse=_parse_rule_id, expected="a rule's id", remedy="'kvferry rules' lists the ids"),
    Reason: TextKind(
        parse=_parse_reason,
        expected="the reason as text",
        remedy="say in a few words why the rule may be ignored here",
    ),
}
