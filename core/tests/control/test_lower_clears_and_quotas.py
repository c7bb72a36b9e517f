"""What a tier below the first remembers of clears and quotas while its store is not open."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from kvferry.control.deadlines import NEVER
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkFacts, ChunkWrite
from kvferry.control.stale import CLEARS_KEPT, Stale
from kvferry.testing.owners import OwnersApart

NAMES = st.sampled_from(["", "a", "b"])
CLEARS = st.lists(st.tuples(st.none() | NAMES, st.none() | NAMES), max_size=4)
QUOTAS = st.dictionaries(NAMES, st.none() | st.integers(0, 100))


def facts(salt: str, model: str) -> ChunkFacts:
    return ChunkFacts(bytes(32), None, 0, 16, (), salt, model, NEVER)


@given(clears=CLEARS, salt=NAMES, model=NAMES)
def test_a_chunk_is_stale_exactly_if_some_clear_was_about_it(
    clears: list[tuple[str | None, str | None]], salt: str, model: str
) -> None:
    stale = Stale()
    for clear in clears:
        stale.add(*clear)
    assert bool(stale) == bool(clears)
    expected = any(s in (None, salt) and m in (None, model) for s, m in clears)
    assert stale.covers(facts(salt, model)) == expected
    stale.clear()
    assert not stale
    assert not stale.covers(facts(salt, model))


def test_of_very_many_clears_none_is_forgotten() -> None:
    stale = Stale()
    for number in range(CLEARS_KEPT + 5):
        stale.add(f"salt {number}", None)
    assert all(stale.covers(facts(f"salt {number}", "")) for number in range(CLEARS_KEPT + 5))


def manager(quotas: Mapping[str, int | None], default: int | None) -> CacheManager:
    policy = OwnersApart(quotas, default)
    return CacheManager(
        capacity=8,
        chunk_tokens=16,
        block_tokens=4,
        policy=policy,
        lease_seconds=60.0,
        write_seconds=60.0,
        quotas=policy,
        slot_bytes=10,
    )


@given(
    first=QUOTAS,
    now=QUOTAS,
    defaults=st.tuples(st.none() | st.integers(0, 99), st.none() | st.integers(0, 99)),
)
def test_a_new_index_has_the_quotas_that_the_former_one_had_at_last(
    first: dict[str, int | None],
    now: dict[str, int | None],
    defaults: tuple[int | None, int | None],
) -> None:
    former, new = manager(now, defaults[1]), manager(first, defaults[0])
    new.take_quotas_of(former)
    assert new.quota_report() == former.quota_report()


def test_refusals_are_counted_on_over_a_new_index() -> None:
    former = manager({"a": 10}, None)
    former.grow(8)
    digests = [bytes([number]) * 32 for number in range(3)]
    writes = [
        ChunkWrite(digest, digests[depth - 1] if depth else None, depth, 16)
        for depth, digest in enumerate(digests)
    ]
    former.reserve("w", "a", writes, 0.0)
    new = manager({}, None)
    new.take_quotas_of(former)
    (owner,) = new.quota_report().owners
    assert (owner.owner, owner.quota, owner.held_slots, owner.over_quota) == ("a", 10, 0, 2)
