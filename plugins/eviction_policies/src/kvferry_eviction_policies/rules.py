"""EVICT001 and following: what must hold for quotas."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvferry.api import UNLIMITED, Check, Example, Known, Path, Rule, Severity

_GIB = 1 << 30
_MIB = 1 << 20
_QUOTAS = "tiers.*.eviction.quotas"
_DEFAULT = "tiers.*.eviction.default"
_CAPACITY = "tiers.*.capacity"
_CHUNK = "engine.chunk_bytes"
_IS_ISOLATED = Path("tiers.*.eviction.use") == "isolated_lru"

# As vLLM 0.32 checks the cache_salt of a request.
_LONGEST_SALT = 128
_NEVER_IN_SALTS = frozenset("@/\\\0")
_VARIABLE = re.compile(r"\$\{[^}]*\}|\$\([^)]*\)")


def _fit(quotas: Mapping[str, int], capacity: int) -> bool:
    return sum(quota for quota in quotas.values() if quota != UNLIMITED) <= capacity


def _hold_a_chunk(quotas: Mapping[str, int], default: int, chunk: int) -> bool:
    return all(not quota or quota >= chunk for quota in (*quotas.values(), default))


def _can_occur(quotas: Mapping[str, int]) -> bool:
    return all(len(salt) <= _LONGEST_SALT and not _NEVER_IN_SALTS & set(salt) for salt in quotas)


def _look_meant(quotas: Mapping[str, int]) -> bool:
    return all(salt == salt.strip() and not _VARIABLE.search(salt) for salt in quotas)


def _keep_something(quotas: Mapping[str, int], default: int) -> bool:
    return default > 0 or any(quota > 0 for quota in quotas.values())


def _tier(quotas: Mapping[str, int], default: int = UNLIMITED, **more: object) -> dict[str, object]:
    return {
        "tiers.t.eviction.use": "isolated_lru",
        "tiers.t.eviction.quotas": quotas,
        "tiers.t.eviction.default": default,
        **more,
    }


def _sized(quotas: Mapping[str, int]) -> dict[str, object]:
    return _tier(quotas, **{"tiers.t.capacity": 8 * _GIB})


def _with_engine(quotas: Mapping[str, int], default: int) -> dict[str, object]:
    return _tier(quotas, default, **{_CHUNK: 4 * _MIB})


RULES = (
    Rule(
        id="EVICT001",
        severity=Severity.WARNING,
        each="tiers",
        when=_IS_ISOLATED,
        require=Check(f"the sum of {_QUOTAS} <= {_CAPACITY}", (_QUOTAS, _CAPACITY), _fit),
        message="the quotas add up to more than the tier's {tiers.*.capacity:size}, so they cannot all be "
        "used at once",
        fix="lower quotas or raise the capacity; while all owners together want more than there is, room "
        "comes from the one that holds most relative to its quota",
        source="design",
        examples=(
            Example(facts=_sized({"a": 4 * _GIB, "b": 4 * _GIB, "c": UNLIMITED}), passes=True),
            Example(facts=_sized({"a": 4 * _GIB, "b": 5 * _GIB}), passes=False),
        ),
    ),
    Rule(
        id="EVICT002",
        severity=Severity.ERROR,
        each="tiers",
        when=_IS_ISOLATED & Known(_CHUNK),
        require=Check(
            f"each of {_QUOTAS} and {_DEFAULT} is 0 or >= {_CHUNK}",
            (_QUOTAS, _DEFAULT, _CHUNK),
            _hold_a_chunk,
        ),
        message="a quota is smaller than one chunk of {engine.chunk_bytes:size}, so its owner could never "
        "keep anything",
        fix="give a quota of many chunks, or 0B if nothing is to be kept, or lower chunk_tokens",
        source="design",
        examples=(
            Example(facts=_with_engine({"a": 4 * _MIB, "b": 0}, 0), passes=True),
            Example(facts=_with_engine({"a": _MIB}, UNLIMITED), passes=False),
            Example(facts=_with_engine({}, _MIB), passes=False),
        ),
    ),
    Rule(
        id="EVICT003",
        severity=Severity.WARNING,
        each="tiers",
        when=_IS_ISOLATED,
        require=Check(
            f"no salt in {_QUOTAS} has more than {_LONGEST_SALT} characters, or one of @ / \\ or NUL",
            (_QUOTAS,),
            _can_occur,
        ),
        message="a salt with a quota cannot occur: vLLM refuses requests whose cache_salt is that long, or "
        "has one of these characters",
        fix="write the salts exactly as requests carry them",
        source="upstream-code vLLM 0.32 vllm/entrypoints/generate/base/protocol.py",
        examples=(
            Example(facts=_tier({"tenant-a.example": _GIB, "": _GIB}), passes=True),
            Example(facts=_tier({"tenant@example": _GIB}), passes=False),
            Example(facts=_tier({"a" * 129: _GIB}), passes=False),
        ),
    ),
    Rule(
        id="EVICT004",
        severity=Severity.ERROR,
        each="tiers",
        when=_IS_ISOLATED,
        require=Check(f"{_DEFAULT} or one of {_QUOTAS} > 0", (_QUOTAS, _DEFAULT), _keep_something),
        message="no cache salt may hold anything, so the tier would stay empty",
        fix="raise default, or name the salts that may hold something in quotas",
        source="design",
        examples=(
            Example(facts=_tier({"a": _GIB}, 0), passes=True),
            Example(facts=_tier({}, 0), passes=False),
        ),
    ),
    Rule(
        id="EVICT005",
        severity=Severity.WARNING,
        each="tiers",
        when=_IS_ISOLATED,
        require=Check(
            f"no salt in {_QUOTAS} begins or ends with a blank, or names a variable as in ${{NAME}}",
            (_QUOTAS,),
            _look_meant,
        ),
        message="a salt with a quota looks mistyped: it begins or ends with a blank, or names a variable, "
        "and the configuration is read as it stands",
        fix="write the salts exactly as requests carry them; if they do look so, waive this rule",
        source="design",
        examples=(
            Example(facts=_tier({"tenant-a": _GIB, "tenant b": _GIB, "": _GIB}), passes=True),
            Example(facts=_tier({" tenant-a": _GIB}), passes=False),
            Example(facts=_tier({"${TENANT}": _GIB}), passes=False),
        ),
    ),
)
