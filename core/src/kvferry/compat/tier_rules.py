"""CORE001 to CORE019: what must hold for the tiers."""

from __future__ import annotations

from kvferry.api import Always, Check, Example, Known, Rule, Severity

WITH_ENGINE = Known("engine.block_tokens")
"""An engine gives this always. Rules about one say nothing about a file that is checked alone, and judge
as soon as either it or what they ask of it is known: with an engine, a fact that lacks is not a pass."""

SUPPORTED_GROUP_KINDS = ("full", "mla", "sliding")

SUPPORTED_ENGINE = ~Known("engine.group_kinds") | Check(
    "the engine has KV cache groups and all can be restored",
    ("engine.group_kinds",),
    lambda kinds: len(kinds) > 0 and all(kind in SUPPORTED_GROUP_KINDS for kind in kinds),
)
"""An engine with other groups gets no hits and one message, never a refusal over sizes that nothing
will use; its block sizes are often odd. Where nobody knows the groups, they are taken for usual ones."""

TIER_RULES = (
    Rule(
        id="CORE001",
        severity=Severity.ERROR,
        waivable=False,
        when=Always(),
        require=Check("at least one tier is configured", ("tiers.*.use",), lambda uses: len(uses) > 0),
        message="no tier is configured, so there is nowhere to keep KV data",
        fix="add a tier, for example  tiers: {cpu: {use: cpu, capacity: 16GiB}}",
        source="design",
        examples=(
            Example(facts={"tiers.cpu.use": "cpu"}, passes=True),
            Example(facts={"chunk_tokens": 256}, passes=False),
        ),
    ),
    Rule(
        id="CORE002",
        severity=Severity.ERROR,
        when=Always(),
        require=Check("at most one tier is configured", ("tiers.*.use",), lambda uses: len(uses) <= 1),
        message="several tiers are configured ({tiers.*.use:names}), and this version drives one",
        fix="keep the tier that suits the machine best and remove the others",
        source="design",
        examples=(
            Example(facts={"tiers.cpu.use": "cpu"}, passes=True),
            Example(facts={"tiers.a.use": "cpu", "tiers.b.use": "cpu"}, passes=False),
        ),
    ),
    Rule(
        id="CORE003",
        severity=Severity.ERROR,
        waivable=False,
        each="tiers",
        when=Always(),
        require=Check(
            "tiers.*.capabilities.addressable",
            ("tiers.*.capabilities.addressable", "tiers.*.use"),
            lambda addressable, _use: bool(addressable),
        ),
        message="the backend {tiers.*.use} does not give plain memory, and the only tier must",
        fix="use an addressable backend such as cpu for this tier",
        source="design",
        examples=(
            Example(
                facts={"tiers.t.use": "cpu", "tiers.t.capabilities.addressable": True},
                passes=True,
            ),
            Example(
                facts={"tiers.t.use": "files", "tiers.t.capabilities.addressable": False},
                passes=False,
            ),
        ),
    ),
    Rule(
        id="CORE004",
        severity=Severity.ERROR,
        each="tiers",
        when=(Known("engine.chunk_bytes") | WITH_ENGINE) & SUPPORTED_ENGINE,
        require=Check(
            "tiers.*.capacity >= engine.chunk_bytes",
            ("tiers.*.capacity", "engine.chunk_bytes"),
            lambda capacity, chunk: bool(capacity >= chunk),
        ),
        message="the tier holds {tiers.*.capacity:size}, less than one chunk of "
        "{engine.chunk_bytes:size}, so it could never keep anything",
        fix="give the tier a capacity of many chunks, or lower chunk_tokens",
        source="design",
        examples=(
            Example(
                facts={
                    "engine.group_kinds": ("full",),
                    "engine.chunk_bytes": 4 << 20,
                    "tiers.cpu.capacity": 1 << 30,
                },
                passes=True,
            ),
            Example(
                facts={
                    "engine.group_kinds": ("full",),
                    "engine.chunk_bytes": 4 << 20,
                    "tiers.cpu.capacity": 1 << 20,
                },
                passes=False,
            ),
        ),
    ),
)
