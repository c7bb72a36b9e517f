"""CORE001 to CORE006: what must hold for the tiers. CORE002, which allowed one tier only, is not given
to another rule."""

from __future__ import annotations

import os.path
from collections.abc import Mapping

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

IS_FIRST = Check("tiers.*.place.front", ("tiers.*.place.front",), bool)

IS_LOWER = Check(
    "not tiers.*.place.front, and the first tier is in plain memory",
    ("tiers.*.place.front", "tiers.*[place.front].capabilities.addressable"),
    lambda front, firsts: not front and all(firsts),
)
"""Where the first tier is not in memory (CORE003), nothing is said about the others: most likely the order
is wrong."""

# A persistent backend that keeps files names their folder in its key path.
FOLDERS = "tiers.*[capabilities.persistent][path].path"


def folder(path: object) -> str:
    """One spelling for all spellings of a path."""
    return os.path.normpath(str(path))


def lower_tier(**facts: object) -> Mapping[str, object]:
    """Facts of an example: a first tier ``cpu`` in memory, and ``far`` that keeps its chunks by key."""
    return {
        "tiers.cpu.place.front": True,
        "tiers.cpu.capabilities.addressable": True,
        "tiers.cpu.use": "cpu",
        "tiers.far.place.front": False,
        "tiers.far.capabilities.addressable": False,
        **facts,
    }


def _first(*, addressable: bool) -> Mapping[str, object]:
    return {
        "tiers.t.use": "cpu" if addressable else "files",
        "tiers.t.place.front": True,
        "tiers.t.capabilities.addressable": addressable,
    }


def _two_stores(one: str, other: str) -> Mapping[str, object]:
    facts: dict[str, object] = {}
    for tier, path in (("near", one), ("far", other)):
        facts[f"tiers.{tier}.path"] = path
        facts[f"tiers.{tier}.capabilities.persistent"] = True
    return facts


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
        id="CORE003",
        severity=Severity.ERROR,
        waivable=False,
        each="tiers",
        when=IS_FIRST,
        require=Check(
            "tiers.*.capabilities.addressable",
            ("tiers.*.capabilities.addressable", "tiers.*.use"),
            lambda addressable, _use: bool(addressable),
        ),
        message="the backend {tiers.*.use} does not give plain memory, and the first tier must: all bytes "
        "to and from the engine and the other tiers pass through it",
        fix="put a tier in plain memory first (tiers have the order of the file), for example  "
        "cpu: {use: cpu, capacity: 16GiB}",
        source="design",
        examples=(
            Example(facts=_first(addressable=True), passes=True),
            Example(facts=_first(addressable=False), passes=False),
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
    Rule(
        id="CORE005",
        severity=Severity.ERROR,
        waivable=False,
        each="tiers",
        when=IS_LOWER,
        require=Check(
            "not tiers.*.capabilities.addressable",
            ("tiers.*.capabilities.addressable", "tiers.*.use"),
            lambda addressable, _use: not addressable,
        ),
        message="the backend {tiers.*.use} gives plain memory, and every tier behind the first must keep "
        "its chunks by key",
        fix="remove this tier and give its capacity to the first, or choose a backend for it that keeps "
        "chunks by key",
        source="design",
        examples=(
            Example(facts=lower_tier(**{"tiers.far.use": "files"}), passes=True),
            Example(
                facts=lower_tier(**{"tiers.far.use": "cpu", "tiers.far.capabilities.addressable": True}),
                passes=False,
            ),
        ),
    ),
    Rule(
        id="CORE006",
        severity=Severity.ERROR,
        when=Check("several persistent tiers have a path", (FOLDERS,), lambda paths: len(paths) > 1),
        require=Check(
            "no two persistent tiers have the same path",
            (FOLDERS,),
            lambda paths: len({folder(path) for path in paths}) == len(paths),
        ),
        message=f"tiers of one instance keep their chunks in one folder ({{{FOLDERS}:names}}: "
        f"{{{FOLDERS}}}), and a folder belongs to one of them",
        fix="give each tier a path of its own, or keep one tier with the capacity of both",
        source="design",
        examples=(
            Example(facts=_two_stores("/cache/a", "/cache/b"), passes=True),
            Example(facts=_two_stores("/cache/a", "/cache/./a/"), passes=False),
        ),
    ),
)
