"""CORE060 to CORE079: what must hold among several instances on one host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.api import Check, Example, Known, Rule, Scope, Severity
from kvferry.compat.host_rules import COMFORTABLE, shown
from kvferry.compat.tier_rules import FOLDERS, folder
from kvferry.config import DEFAULT_INSTANCE

_GIB = 1 << 30
_BOTH_NAMED = Check(
    "one.instance and other.instance are set",
    ("one.instance", "other.instance"),
    lambda one, other: one is not None and other is not None,
)

_SHARED = "tiers.*[capabilities.persistent][path].capabilities.shared"
_STORES = (
    "one.instance",
    f"one.{FOLDERS}",
    f"one.{_SHARED}",
    "other.instance",
    f"other.{FOLDERS}",
    f"other.{_SHARED}",
)

_IN_MEMORY = "instances.*.tiers.*[capabilities.addressable].capacity"
_SHARING = "instances.*.sharing.*.host_bytes"
_EACH = f"{{{_IN_MEMORY}:size}} each in tiers and {{{_SHARING}:size}} for sharing"
_WORKERS = "instances.*.engine.workers"
_WORKERS_KNOWN = Known(_WORKERS)


def _kept_apart(
    one: str | None,
    one_paths: Sequence[object],
    one_shared: Sequence[bool],
    other: str | None,
    other_paths: Sequence[object],
    other_shared: Sequence[bool],
) -> bool:
    """In one folder, a backend tells instances apart by their names; no two have the same at a time."""
    if (one or DEFAULT_INSTANCE) != (other or DEFAULT_INSTANCE):
        return True
    mine = {folder(path) for path, shared in zip(one_paths, one_shared, strict=True) if not shared}
    taken = {folder(path) for path, shared in zip(other_paths, other_shared, strict=True) if not shared}
    return mine.isdisjoint(taken)


def _many_fit(share: float = 1) -> Check:
    return Check(
        "sum over all instances of engine.workers x (tiers.*.capacity in memory and sharing.*.host_bytes) "
        f"<= {shown(share)}host.memory_bytes",
        (_WORKERS, _IN_MEMORY, _SHARING, "host.memory_bytes"),
        lambda workers, capacities, sharing, memory: (
            sum(
                count * (sum(each) + sum(beside))
                for count, each, beside in zip(workers, capacities, sharing, strict=True)
            )
            <= share * memory
        ),
    )


def _ones_fit(share: float = 1) -> Check:
    return Check(
        "sum over all instances of tiers.*.capacity in memory and sharing.*.host_bytes <= "
        f"{shown(share)}host.memory_bytes",
        (_IN_MEMORY, _SHARING, "host.memory_bytes"),
        lambda capacities, sharing, memory: (
            sum(map(sum, capacities)) + sum(map(sum, sharing)) <= share * memory
        ),
    )


def _stores(
    one: str, other: str, *, names: tuple[str | None, str | None] = (None, None), shared: bool = False
) -> Mapping[str, object]:
    facts: dict[str, object] = {}
    for word, path, name in zip(("one", "other"), (one, other), names, strict=True):
        facts[f"{word}.instance"] = name
        facts[f"{word}.tiers.disk.path"] = path
        facts[f"{word}.tiers.disk.capabilities.persistent"] = True
        facts[f"{word}.tiers.disk.capabilities.shared"] = shared
    return facts


def _fleet(*capacities: int, workers: int | None = None, staging: int = 0) -> Mapping[str, object]:
    facts: dict[str, object] = {"host.memory_bytes": 64 * _GIB}
    for label, capacity in zip("abcd", capacities, strict=False):
        facts[f"instances.{label}.tiers.cpu.capacity"] = capacity * _GIB
        facts[f"instances.{label}.tiers.cpu.capabilities.addressable"] = True
        if workers is not None:
            facts[f"instances.{label}.engine.workers"] = workers
        if staging:
            facts[f"instances.{label}.sharing.staging.host_bytes"] = staging * _GIB
    return facts


def _pair(**facts: tuple[object, object]) -> Mapping[str, object]:
    return {
        f"{word}.{name}": value
        for name, values in facts.items()
        for word, value in zip(("one", "other"), values, strict=True)
    }


FLEET_RULES = (
    Rule(
        id="CORE060",
        severity=Severity.ERROR,
        scope=Scope.PAIR,
        when=_BOTH_NAMED,
        require=Check(
            "one.instance != other.instance",
            ("one.instance", "other.instance"),
            lambda one, other: bool(one != other),
        ),
        message="both instances are called {one.instance}, so their peers cannot tell them apart",
        fix="give each a name of its own, or leave out instance",
        source="design",
        examples=(
            Example(facts=_pair(instance=("a", "b")), passes=True),
            Example(facts=_pair(instance=(None, None)), passes=True),
            Example(facts=_pair(instance=("a", "a")), passes=False),
        ),
    ),
    Rule(
        id="CORE061",
        severity=Severity.ERROR,
        scope=Scope.PAIR,
        when=Check(
            "one and other have persistent tiers with a path",
            (f"one.{FOLDERS}", f"other.{FOLDERS}"),
            lambda one, other: bool(one) and bool(other),
        ),
        require=Check(
            "the instances differ in name, or no path of a persistent tier that is not shared is in both",
            _STORES,
            _kept_apart,
        ),
        requires=("CORE060",),
        message=f"persistent tiers keep their chunks in one folder ({{one.{FOLDERS}}}; {{other.{FOLDERS}}}), "
        "and there instances are told apart by name alone (instance: {one.instance}; {other.instance})",
        fix="name the instances, for example  instance: a  and  instance: b, or give the tier of each a path "
        "of its own",
        source="design",
        examples=(
            Example(facts=_stores("/cache/a", "/cache/b"), passes=True),
            Example(facts=_stores("/cache", "/cache", names=("a", None)), passes=True),
            Example(facts=_stores("/cache", "/cache", shared=True), passes=True),
            Example(facts=_stores("/cache/a", "/cache/./a/"), passes=False),
        ),
    ),
    Rule(
        id="CORE062",
        severity=Severity.WARNING,
        scope=Scope.PAIR,
        when=Check(
            "one.model_identity is set and equals other.model_identity",
            ("one.model_identity", "other.model_identity"),
            lambda one, other: one is not None and bool(one == other),
        ),
        require=Check(
            "one.chunk_tokens == other.chunk_tokens",
            ("one.chunk_tokens", "other.chunk_tokens"),
            lambda one, other: bool(one == other),
        ),
        message="both instances give their model the identity {one.model_identity}, but chunks of "
        "{one.chunk_tokens} and {other.chunk_tokens} tokens have different keys, so neither can ever use "
        "what the other has stored",
        fix="set the same chunk_tokens in both",
        source="design",
        examples=(
            Example(facts=_pair(model_identity=("m", "m"), chunk_tokens=(256, 256)), passes=True),
            Example(facts=_pair(model_identity=("m", "n"), chunk_tokens=(256, 512)), passes=True),
            Example(facts=_pair(model_identity=("m", "m"), chunk_tokens=(256, 512)), passes=False),
        ),
    ),
    Rule(
        id="CORE063",
        severity=Severity.NOTE,
        scope=Scope.PAIR,
        when=_BOTH_NAMED,
        require=Check(
            "one.model_identity == other.model_identity",
            ("one.model_identity", "other.model_identity"),
            lambda one, other: bool(one == other),
        ),
        message="{one.instance} and {other.instance} are named as peers, but give their models different "
        "identities ({one.model_identity}, {other.model_identity}), so they have no key in common",
        fix="nothing to mend if they serve different models, else set the same model_identity in both",
        source="design",
        examples=(
            Example(facts=_pair(instance=("a", "b"), model_identity=("m", "m")), passes=True),
            Example(facts=_pair(instance=("a", "b"), model_identity=("m", None)), passes=False),
        ),
    ),
    Rule(
        id="CORE064",
        severity=Severity.ERROR,
        scope=Scope.FLEET,
        when=_WORKERS_KNOWN,
        require=_many_fit(),
        requires=("CORE040",),
        message=f"together the instances need more than the {{host.memory_bytes:size}} of memory that the "
        f"machine has: {{{_WORKERS}}} workers with {_EACH}",
        fix="capacity is per worker: lower it until all workers of all instances fit",
        source="design",
        examples=(
            Example(facts=_fleet(8, 16, workers=2), passes=True),
            Example(facts=_fleet(16, 24, workers=2), passes=False),
            Example(facts=_fleet(8, 16, workers=2, staging=8), passes=False),
        ),
    ),
    Rule(
        id="CORE065",
        severity=Severity.WARNING,
        scope=Scope.FLEET,
        when=_WORKERS_KNOWN,
        require=_many_fit(COMFORTABLE),
        requires=("CORE041", "CORE064"),
        message=f"together the instances leave little of the {{host.memory_bytes:size}} of memory to the "
        f"engines and the models: {{{_WORKERS}}} workers with {_EACH}",
        fix="capacity is per worker: lower it, or make sure that nothing else needs the memory",
        source="design",
        examples=(
            Example(facts=_fleet(8, 16, workers=2), passes=True),
            Example(facts=_fleet(12, 16, workers=2), passes=False),
        ),
    ),
    Rule(
        id="CORE066",
        severity=Severity.ERROR,
        scope=Scope.FLEET,
        when=~_WORKERS_KNOWN,
        require=_ones_fit(),
        requires=("CORE042",),
        message=f"with one worker each, the instances need {_EACH}, more than the "
        "{host.memory_bytes:size} of memory that the machine has",
        fix="lower the capacities, or check the files on the machine that they are meant for",
        source="design",
        examples=(
            Example(facts=_fleet(16, 24), passes=True),
            Example(facts=_fleet(32, 40), passes=False),
            Example(facts=_fleet(16, 24, staging=16), passes=False),
        ),
    ),
    Rule(
        id="CORE067",
        severity=Severity.WARNING,
        scope=Scope.FLEET,
        when=~_WORKERS_KNOWN,
        require=_ones_fit(COMFORTABLE),
        requires=("CORE043", "CORE066"),
        message=f"with one worker each, the instances need {_EACH}, which leaves little of the "
        "{host.memory_bytes:size} of memory to the engines and the models",
        fix="lower the capacities, or check the files on the machine that they are meant for",
        source="design",
        examples=(
            Example(facts=_fleet(16, 24), passes=True),
            Example(facts=_fleet(24, 32), passes=False),
        ),
    ),
)
