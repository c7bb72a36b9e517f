"""An operator looks at the tiers below the first and changes them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from attrs import define, field

from kvferry.api import Backend, BackendContext, ChunkKey, ErrorKind, KVFerryError, ReadStatus, Span, Ticket
from kvferry.data.questions import QUESTIONS_VERSION
from kvferry.runtime import RequestOptions
from kvferry.runtime.instances import Card
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings, LowerFake, wait_until
from kvferry.testing.keyed_backends import ForwardingBackend, Record, ShelfBackend
from kvferry.testing.owners import OwnersApart

CHUNK = 16
CARD = msgspec.json.encode(
    Card(
        name="here",
        engine_id="fake",
        pid=os.getpid(),
        version="1",
        questions=QUESTIONS_VERSION,
        tiers=("memory", "ssd", "far"),
    )
).decode()
BIG = 1 << 30


def refused() -> KVFerryError:
    return KVFerryError("the disk is gone", kind=ErrorKind.IO, remedy="plug it in")


class Disk(ForwardingBackend):
    """A backend of a :class:`Shelf`."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(ShelfBackend(shelf.records, BIG))
        self._shelf = shelf

    def open(self, context: BackendContext) -> None:
        if self._shelf.broken:
            raise refused()
        super().open(context)

    def write(self, batch: Any, deadline: float) -> Any:
        if self._shelf.broken:
            raise refused()
        return super().write(batch, deadline)

    def read(self, batch: Sequence[tuple[ChunkKey, Span]], deadline: float) -> Ticket[ReadStatus]:
        inner = super().read(batch, deadline)
        outer: Ticket[ReadStatus] = Ticket(len(batch))

        def tell() -> None:
            self._shelf.slow.wait(10.0)
            outer.complete(inner.results)

        # On a thread of its own, because the backend's own may be needed meanwhile.
        inner.on_done(lambda _ticket: threading.Thread(target=tell).start())
        return outer


@define
class Shelf:
    """A store that outlives its backends, and may be slow or broken."""

    records: dict[ChunkKey, Record] = field(factory=dict)
    broken: bool = False
    slow: threading.Event = field(factory=threading.Event)
    """Reads end once it is set."""

    def backend(self, rank: int) -> Backend:
        del rank
        return Disk(self)


@pytest.fixture
def shelves() -> dict[str, Shelf]:
    made = {name: Shelf() for name in ("ssd", "far")}
    for shelf in made.values():
        shelf.slow.set()
    return made


@pytest.fixture
def open_tiers(open_instance: Any, shelves: dict[str, Shelf]) -> Callable[..., FakeInstance]:
    def open_(slots: int = 64, quotas: Any = None, **settings: Any) -> FakeInstance:
        settings = {"retry_after": 0.05, **settings}
        lower = tuple(
            LowerFake(make_backend=shelf.backend, name=name, settings=settings, quotas=quotas)
            for name, shelf in shelves.items()
        )
        engine = EngineSettings(prefix_cache=False, step_tokens=200)
        opened = open_instance(InstanceSettings(engine=engine, slots=slots, lower=lower), card=CARD)
        assert isinstance(opened, FakeInstance)
        return opened

    return open_


def serve(
    instance: FakeInstance, start: int = 0, chunks: int = 3, salt: str = "", *, store: bool = True
) -> int:
    """Tokens that a prompt hit; one token more than its chunks, so that all of them can be."""
    tokens = list(range(start, start + chunks * CHUNK + 1))
    request = instance.engine.add(tokens, salt=salt, options=RequestOptions(store=store))
    instance.engine.run()
    instance.settle_lower()
    return sum(request.hits)


def by_tier(answer: Any) -> dict[str, tuple[int, int, int]]:
    return {part["tier"]: (part["removed"], part["kept"], part["doomed"]) for part in answer["by_tier"]}


def emptied(*shelves: Shelf) -> None:
    wait_until(lambda: not any(shelf.records for shelf in shelves), 10.0, "chunks that stayed in a store")


def test_status_shows_every_tier_and_what_requests_have_of_it(
    open_tiers: Any, shelves: dict[str, Shelf], live: Callable[..., Any]
) -> None:
    instance = open_tiers()
    serve(instance)
    live("clear", "--tier", "memory")
    assert serve(instance, store=False) == 3 * CHUNK
    status = live("status")
    assert (status["schema"], status["tier"], status["numbers"]["resident"]) == (1, "memory", 3)
    assert [tier["tier"] for tier in status["lower"]] == ["ssd", "far"]
    ssd, far = status["lower"]
    assert (ssd["health"], ssd["reason"]) == ("open", "")
    assert ssd["numbers"]["chunks"] == ssd["numbers"]["stored"] == ssd["numbers"]["fetched"] == 3
    assert (far["numbers"]["chunks"], far["numbers"]["fetched"]) == (3, 0)
    assert ssd["numbers"]["capacity"] == 256
    assert status["waiting"]["risen_tokens"] == 3 * CHUNK
    assert status["waiting"]["rises_under_way"] == 0
    text = live("status", text=True)
    assert "tier ssd: open\n" in text
    assert "tier far: open\n" in text


def test_an_instance_without_lower_tiers_shows_none(open_instance: Any, live: Callable[..., Any]) -> None:
    open_instance(InstanceSettings(), card=CARD)
    status = live("status")
    assert (status["lower"], status["waiting"]) == ([], {})
    assert "below the first" not in live("status", text=True)


def test_clear_empties_every_tier_and_its_store_and_counts_them(
    open_tiers: Any, shelves: dict[str, Shelf], live: Callable[..., Any]
) -> None:
    instance = open_tiers()
    serve(instance)
    serve(instance, salt="tenant")
    assert all(len(shelf.records) == 6 for shelf in shelves.values())
    gone = live("clear", "--salt", "tenant")
    assert by_tier(gone) == dict.fromkeys(("memory", "ssd", "far"), (3, 0, 0))
    assert gone["removed"] == 9
    wait_until(lambda: all(len(shelf.records) == 3 for shelf in shelves.values()), 10.0, "chunks stayed")
    assert {record.header.owner for shelf in shelves.values() for record in shelf.records.values()} == {""}
    assert serve(instance, salt="tenant", store=False) == 0
    assert live("clear", text=True).splitlines() == [
        "tier memory: 3 chunks removed",
        "tier ssd: 3 chunks removed",
        "tier far: 3 chunks removed",
    ]
    emptied(*shelves.values())
    assert serve(instance, store=False) == 0
    instance.check_idle()


def test_clear_of_one_tier_leaves_the_others_alone(
    open_tiers: Any, shelves: dict[str, Shelf], live: Callable[..., Any]
) -> None:
    instance = open_tiers()
    serve(instance)
    assert by_tier(live("clear", "--tier", "ssd")) == {"ssd": (3, 0, 0)}
    emptied(shelves["ssd"])
    assert len(shelves["far"].records) == 3
    assert by_tier(live("clear", "--tier", "memory")) == {"memory": (3, 0, 0)}
    assert serve(instance, store=False) == 3 * CHUNK
    far = instance.scheduler.lower_tiers()[1]
    assert far.fetched == 3
    # What rose is copied to the tier that had lost it.
    wait_until(lambda: len(shelves["ssd"].records) == 3, 10.0, "no copy down")
    instance.settle_lower()
    instance.check_idle()


def test_clear_counts_what_is_being_read_as_kept_and_deletes_it_afterwards(
    open_tiers: Any, shelves: dict[str, Shelf], live: Callable[..., Any]
) -> None:
    """LMCache#1660, LMCache#1766: a clear that removed nothing, and one that ignored its tier."""
    instance = open_tiers(load_deadline=30.0)
    serve(instance, chunks=10)
    live("clear", "--tier", "memory")
    live("clear", "--tier", "far")
    shelves["ssd"].slow.clear()
    request = instance.engine.add(list(range(2 * CHUNK + 1)), options=RequestOptions(store=False))
    instance.engine.step()
    try:
        wait_until(lambda: instance.scheduler.lower_tiers()[0].fetching == 2, 10.0, "no fetch")
        gone = by_tier(live("clear"))
        assert gone == {"memory": (0, 0, 2), "ssd": (8, 2, 0), "far": (0, 0, 0)}
        wait_until(lambda: len(shelves["ssd"].records) == 2, 10.0, "chunks that stayed")
    finally:
        shelves["ssd"].slow.set()
    instance.engine.run()
    instance.settle_lower()
    emptied(shelves["ssd"])
    assert sum(request.hits) == 0
    instance.check_idle()


def test_what_was_cleared_while_a_tier_was_not_open_is_not_found_at_its_next_opening(
    open_tiers: Any, shelves: dict[str, Shelf], live: Callable[..., Any]
) -> None:
    instance = open_tiers()
    serve(instance)
    serve(instance, salt="tenant")
    break_down(instance, shelves["ssd"])
    cleared = live("clear", "--salt", "tenant")
    assert by_tier(cleared) == {"memory": (3, 0, 0), "ssd": (0, 0, 0), "far": (3, 0, 0)}
    assert [part["health"] == "open" for part in cleared["by_tier"]] == [True, False, True]
    assert "goes when it is opened" in live("clear", "--salt", "nobody", text=True)
    shelves["ssd"].broken = False
    wait_until(instance.lower_open, 10.0, "a tier that is not opened again")
    assert instance.scheduler.lower_tiers()[0].adopted == 3
    wait_until(lambda: len(shelves["ssd"].records) >= 3, 10.0, "chunks are gone")
    assert serve(instance, salt="tenant", store=False) == 0
    wait_until(
        lambda: "tenant" not in {record.header.owner for record in list(shelves["ssd"].records.values())},
        10.0,
        "cleared chunks that stayed in the store",
    )
    live("clear", "--tier", "memory")
    assert serve(instance, store=False) == 3 * CHUNK


def break_down(instance: FakeInstance, shelf: Shelf) -> None:
    """Let the tier fail."""
    shelf.broken = True
    for number in range(5):
        serve(instance, start=10_000 * (number + 1))
    wait_until(lambda: not instance.lower_open(), 10.0, "a tier that did not fail")


def quota_policy() -> OwnersApart:
    return OwnersApart({}, None)


def test_quotas_belong_to_a_tier_and_outlive_its_failure(
    open_tiers: Any, shelves: dict[str, Shelf], live: Callable[..., Any]
) -> None:
    instance = open_tiers(quotas=quota_policy)
    serve(instance, salt="a", chunks=4)
    slot = slot_bytes(live)
    changed = live("quota", "set", "a", f"{3 * slot}B", "--tier", "ssd")
    assert (changed["tier"], changed["evicted"]) == ("ssd", 1)
    assert changed["owners"] == [{"owner": "a", "quota": 3 * slot, "held": 3 * slot, "over_quota": 0}]
    assert live("quota", "list", "--tier", "far")["owners"] == []
    live("quota", "set", "--default", f"{9 * slot}B", "--tier", "ssd")
    assert live("quota", "list", "--tier", "ssd", text=True).startswith("tier ssd\n")
    break_down(instance, shelves["ssd"])
    assert live("quota", "list", "--tier", "ssd")["default"] == 9 * slot
    live("quota", "set", "a", f"{2 * slot}B", "--tier", "ssd")
    shelves["ssd"].broken = False
    wait_until(instance.lower_open, 10.0, "a tier that is not opened again")

    def held() -> int:
        (owner,) = live("quota", "list", "--tier", "ssd")["owners"]
        return int(owner["held"])

    wait_until(lambda: held() == 2 * slot, 10.0, "a quota that is not true")
    assert live("quota", "forget", "a", "--tier", "ssd")["owners"] == []
    assert live("quota", "list", "--tier", "ssd")["default"] == 9 * slot


def slot_bytes(live: Callable[..., Any]) -> int:
    answer = live("quota", "list", "--tier", "ssd")
    return int(answer["others_held"]) // 4


def test_quotas_of_a_tier_without_any_and_of_an_unknown_one_are_clear_errors(
    open_tiers: Any, live: Callable[..., Any]
) -> None:
    open_tiers()
    for words in (("list",), ("set", "a", "1GiB"), ("set", "--default", "unlimited"), ("forget", "a")):
        code, complaint = live("quota", *words, "--tier", "far")
        assert code == 2
        assert "'far' keeps no quotas" in complaint
        code, complaint = live("quota", *words, "--tier", "tape")
        assert code == 2
        assert "memory, ssd, far" in complaint
    code, complaint = live("clear", "--tier", "tape")
    assert code == 2
    assert "memory, ssd, far" in complaint


def test_waits_are_counted_from_the_first_no_to_the_answer(
    open_tiers: Any, shelves: dict[str, Shelf]
) -> None:
    instance = open_tiers(load_deadline=30.0)
    serve(instance)
    before = instance.scheduler.lower_statistics()
    assert before is not None
    assert (before.waits, before.wait_seconds, before.risen_tokens) == (0, 0.0, 0)
    clear_first(instance)
    shelves["ssd"].slow.clear()
    prompts = [instance.engine.add(list(range(3 * CHUNK + 1))) for _ in range(2)]
    for _ in range(3):
        instance.engine.step()
    during = instance.scheduler.lower_statistics()
    assert during is not None
    assert (during.waits, during.rises_shared, during.rises_under_way) == (2, 1, 1)
    shelves["ssd"].slow.set()
    instance.engine.run()
    instance.settle_lower()
    after = instance.scheduler.lower_statistics()
    assert after is not None
    assert [sum(prompt.hits) for prompt in prompts] == [3 * CHUNK, 3 * CHUNK]
    assert after.risen_tokens == 6 * CHUNK
    assert after.tiers[0].fetched == 3
    assert (after.waits, after.waits_expired, after.rises_under_way) == (2, 0, 0)
    assert after.wait_seconds > 0
    # What the first tier has by now came up for others.
    serve(instance, store=False)
    assert instance.scheduler.lower_statistics() == after


def test_a_wait_that_ends_at_its_deadline_is_counted_and_the_request_computes(
    open_tiers: Any, shelves: dict[str, Shelf]
) -> None:
    instance = open_tiers(load_deadline=0.05)
    serve(instance)
    clear_first(instance)
    shelves["ssd"].slow.clear()
    request = instance.engine.add(list(range(3 * CHUNK + 1)), options=RequestOptions(store=False))
    try:
        instance.engine.run()
    finally:
        shelves["ssd"].slow.set()
    instance.settle_lower()
    assert sum(request.hits) == 0
    statistics = instance.scheduler.lower_statistics()
    assert statistics is not None
    assert (statistics.waits, statistics.waits_expired, statistics.risen_tokens) == (1, 1, 0)
    assert statistics.wait_seconds > 0


def test_only_what_came_up_counts_as_risen(open_tiers: Any) -> None:
    instance = open_tiers()
    serve(instance)
    with instance.scheduler._lock:
        assert instance.manager.evict(2) == 2  # the first chunk stays
    assert serve(instance, store=False) == 3 * CHUNK
    statistics = instance.scheduler.lower_statistics()
    assert statistics is not None
    assert statistics.risen_tokens == 2 * CHUNK


def clear_first(instance: FakeInstance) -> None:
    with instance.scheduler._lock:
        instance.manager.clear()


def test_workers_count_the_bytes_that_went_through_each_tier(
    open_tiers: Any, shelves: dict[str, Shelf]
) -> None:
    instance = open_tiers()
    serve(instance)
    clear_first(instance)
    serve(instance, store=False)
    (worker,) = instance.workers
    stored = sum(len(record.value) for record in shelves["ssd"].records.values())
    ssd, far = (worker.tier_statistics()[name] for name in ("ssd", "far"))
    assert (ssd.written_bytes, ssd.read_bytes) == (stored, stored)
    assert (far.written_bytes, far.read_bytes, far.read_seconds) == (stored, 0, 0.0)
    assert min(ssd.write_seconds, ssd.read_seconds, far.write_seconds) > 0
    # Of what cannot be read, nothing counts.
    clear_first(instance)
    key, record = next((k, r) for k, r in shelves["ssd"].records.items() if r.header.depth == 2)
    del shelves["ssd"].records[key]
    serve(instance, store=False)
    assert worker.tier_statistics()["ssd"].read_bytes == 2 * stored - len(record.value)


def test_the_log_tells_of_openings_failures_and_openings_again(
    open_tiers: Any, shelves: dict[str, Shelf], caplog: pytest.LogCaptureFixture
) -> None:
    def lines(level: int, *words: str) -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.levelno == level]
        return [line for line in found if all(word in line for word in words)]

    caplog.set_level(logging.INFO, "kvferry")
    instance = open_tiers()
    serve(instance)
    wait_until(lambda: lines(logging.INFO, "tier ssd is open") != [], 10.0, "no word of the opening")
    (opened,) = lines(logging.INFO, "tier ssd is open")
    assert "0 chunks were found, 256 fit" in opened
    break_down(instance, shelves["ssd"])
    wait_until(lambda: lines(logging.WARNING, "tier ssd failed") != [], 10.0, "no word of the failure")
    (failed,) = lines(logging.WARNING, "tier ssd failed")
    assert "opened again after 0.05 s" in failed
    assert "the disk is gone" in failed
    shelves["ssd"].broken = False
    wait_until(lambda: lines(logging.INFO, "tier ssd is open again") != [], 10.0, "no word of the opening")
    (again,) = lines(logging.INFO, "tier ssd is open again")
    assert "3 chunks were found" in again
    # Openings failed in between, which nobody wants to read of one by one.
    assert len(lines(logging.WARNING, "tier ssd failed")) == 1
    assert len(lines(logging.WARNING, "tier ssd:")) <= 1


def test_the_end_of_an_engine_is_no_failure(open_tiers: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    instance = open_tiers()
    serve(instance)
    instance.workers[0].close()
    wait_until(lambda: not instance.scheduler.workers_ready(), 10.0, "a worker that stays")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert [tier.failures for tier in instance.scheduler.lower_tiers()] == [0, 0]
