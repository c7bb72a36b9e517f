"""An operator looks at running instances and changes them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.api import ErrorKind, KVFerryError
from kvferry.config import Config
from kvferry.data.questions import (
    QUESTIONS_VERSION,
    Answer,
    AskClear,
    AskQuotas,
    AskStatus,
    Cleared,
    Quotas,
    Status,
)
from kvferry.data.wire import Ask
from kvferry.runtime import PinRequest, RequestOptions
from kvferry.runtime.address import MeetingPlace, runtime_root
from kvferry.runtime.instances import Card, ask, choose_instance, find_instances, instance_card
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings, wait_until
from kvferry.testing.owners import OwnersApart

CHUNK = 16
CARD = msgspec.json.encode(
    Card(
        name="here",
        engine_id="fake",
        pid=os.getpid(),
        version="1",
        questions=QUESTIONS_VERSION,
        tiers=("memory",),
    )
).decode()
OWNER = """
import sys, time
from kvferry.runtime.address import MeetingPlace
place = MeetingPlace("dead", sys.argv[1], {})
place.claim(sys.argv[2])
print("here", flush=True)
time.sleep(60)
"""


@pytest.fixture
def instance(open_instance: Any) -> FakeInstance:
    engine = EngineSettings(prefix_cache=False, step_tokens=200)
    opened = open_instance(InstanceSettings(engine=engine, slots=64), card=CARD)
    assert isinstance(opened, FakeInstance)
    return opened


def serve(instance: FakeInstance, start: int = 0, length: int = 3 * CHUNK, **more: Any) -> int:
    options = RequestOptions(**{name: more.pop(name) for name in ("pin", "ttl", "store") if name in more})
    request = instance.engine.add(list(range(start, start + length)), options=options, **more)
    instance.engine.run()
    instance.settle_saves()
    return sum(request.hits)


def test_list_and_status_show_what_runs(instance: FakeInstance, live: Callable[..., Any]) -> None:
    serve(instance)
    (row,) = live("list")["instances"]
    assert (row["instance"], row["alive"], row["pid"], row["tiers"]) == (
        "here",
        True,
        os.getpid(),
        ["memory"],
    )
    for words in ((), ("here",), (row["id"],)):
        status = live("status", *words)
        assert status["tier"] == "memory"
        assert status["workers_ready"] is True
        assert status["numbers"]["resident"] == 3
        assert status["numbers"]["queries"] == 1
    assert "resident" in live("status", text=True)
    assert live("list", text=True).splitlines()[1].split()[:3] == ["here", row["id"], "running"]


def test_clear_takes_what_was_chosen_and_requests_go_on(
    instance: FakeInstance, live: Callable[..., Any]
) -> None:
    serve(instance)
    serve(instance, salt="tenant")
    assert live("clear", "--model", "adapter")["removed"] == 0
    assert live("clear", "--salt", "tenant", "--tier", "memory")["removed"] == 3
    assert live("clear", "--base-model", "--salt", "x")["removed"] == 0
    assert serve(instance, length=3 * CHUNK + 1, store=False) == 3 * CHUNK
    assert live("clear", text=True) == "3 chunks removed\n"
    assert serve(instance, length=3 * CHUNK + 1, store=False) == 0
    instance.settle()
    instance.check_idle()


def test_an_unknown_tier_is_an_error_that_names_the_known_ones(
    instance: FakeInstance, live: Callable[..., Any]
) -> None:
    serve(instance)
    code, complaint = live("clear", "--tier", "ssd")
    assert code == 2
    assert "'ssd'" in complaint
    assert "memory" in complaint
    assert instance.manager.stats().resident == 3


def test_a_request_that_was_matched_before_a_clear_is_matched_again(
    instance: FakeInstance, live: Callable[..., Any]
) -> None:
    serve(instance)
    engine = instance.engine
    waiting = engine.add(list(range(3 * CHUNK + 1)), options=RequestOptions(store=False))
    engine.admit = lambda request: request is not waiting
    engine.step()
    assert instance.manager.stats().leases == 1
    gone = live("clear")
    assert (gone["removed"], gone["kept"]) == (0, 3)
    engine.admit = lambda request: True
    engine.run()
    instance.settle()
    assert sum(waiting.hits) == 0
    instance.check_idle()


def test_pins_are_listed_extended_and_released(instance: FakeInstance, live: Callable[..., Any]) -> None:
    serve(instance, pin=PinRequest("prompt", 60.0), salt="s")
    (pin,) = live("pins", "list")["pins"]
    assert (pin["name"], pin["salt"], pin["chunks"]) == ("prompt", "s", 3)
    assert 0 < pin["seconds"] <= 60
    (pin,) = live("pins", "extend", "prompt", "2h")["pins"]
    assert pin["seconds"] > 7000
    assert live("pins", "release", "prompt", "--salt", "other")[0] == 2
    assert live("pins", "release", "prompt", "--salt", "s")["changed"] == 1
    assert live("pins", "list", text=True) == "nothing is pinned\n"
    code, complaint = live("pins", "release", "prompt")
    assert code == 2
    assert "prompt" in complaint


def test_quotas_of_a_policy_without_any_are_a_clear_error(
    instance: FakeInstance, live: Callable[..., Any]
) -> None:
    for words in (("list",), ("set", "a", "1GiB"), ("set", "--default", "unlimited"), ("forget", "a")):
        code, complaint = live("quota", *words)
        assert code == 2
        assert "keeps no quotas" in complaint


@pytest.mark.parametrize(
    "words",
    [
        ("quota", "set"),
        ("quota", "set", "a"),
        ("quota", "set", "a", "1GiB", "--default", "1GiB"),
        ("quota", "set", "a", "much"),
        ("pins", "extend", "p", "soon"),
        ("clear", "--model", "m", "--base-model"),
    ],
)
def test_bad_words_are_told_before_anybody_is_asked(words: tuple[str, ...], live: Callable[..., Any]) -> None:
    with pytest.raises(SystemExit) as caught:
        live(*words)
    assert caught.value.code == 2


def test_without_an_instance_there_is_one_clear_error(live: Callable[..., Any], folder: Path) -> None:
    assert live("list") == {"schema": 1, "instances": []}
    code, complaint = live("status")
    assert code == 2
    assert "no instance is running" in complaint
    assert str(folder) in complaint


def test_what_a_killed_engine_left_is_shown_as_dead(folder: Path, live: Callable[..., Any]) -> None:
    card = CARD.replace("here", "gone")
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), card], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        assert [row["alive"] for row in live("list")["instances"]] == [True]
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    (row,) = live("list")["instances"]
    assert (row["instance"], row["alive"]) == ("gone", False)
    code, complaint = live("status", "gone")
    assert code == 2
    assert "dead" in complaint


def test_an_instance_that_does_not_answer_is_one_error_after_a_deadline(folder: Path) -> None:
    place = MeetingPlace("hung", str(folder), {})
    place.claim(CARD)  # and nobody listens
    try:
        chosen = choose_instance(runtime_root(str(folder), {}), "here")
        with pytest.raises(KVFerryError) as caught:
            ask(chosen, AskStatus(), Status, seconds=0.2)
        assert caught.value.kind is ErrorKind.TIMEOUT
        assert "here" in caught.value.where
    finally:
        place.release()


def test_another_version_is_refused_by_either_side(open_instance: Any, folder: Path) -> None:
    other = CARD.replace(f'"questions":{QUESTIONS_VERSION}', '"questions":99')
    open_instance(InstanceSettings(), card=other)
    (found,) = find_instances(runtime_root(str(folder), {}))
    with pytest.raises(KVFerryError) as caught:
        ask(found, AskStatus(), Status)
    assert caught.value.kind is ErrorKind.PROTOCOL
    assert "version" in str(caught.value)


def raw_answer(folder: Path, frame: bytes) -> dict[str, Any]:
    import zmq

    (found,) = find_instances(runtime_root(str(folder), {}))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(found.place.endpoint)
        socket.send(frame)
        assert socket.poll(5000)
        answer: dict[str, Any] = msgspec.msgpack.decode(socket.recv())
        return answer


def test_the_instance_itself_refuses_strangers_other_versions_and_nonsense(
    instance: FakeInstance, folder: Path
) -> None:
    serve(instance)
    (found,) = find_instances(runtime_root(str(folder), {}))
    token = found.place.read_token()
    assert token is not None
    clear = msgspec.Raw(msgspec.msgpack.encode(AskClear(None, None, None)))
    nonsense = msgspec.Raw(msgspec.msgpack.encode({"type": "destroy"}))
    for bad, expected in (
        (Ask(QUESTIONS_VERSION, "guess", clear), "token"),
        (Ask(QUESTIONS_VERSION + 1, token, clear), "version"),
        (Ask(QUESTIONS_VERSION, token, nonsense), "cannot be read"),
    ):
        assert expected in raw_answer(folder, msgspec.msgpack.encode(bad))["refused"]
    assert instance.manager.stats().resident == 3
    assert ask(found, AskStatus(), Status).numbers["resident"] == 3


def test_several_instances_are_told_apart_by_their_ids(open_instance: Any, live: Callable[..., Any]) -> None:
    for name in ("one", "two"):
        open_instance(InstanceSettings(engine_id=name), card=CARD)
    rows = live("list")["instances"]
    assert len({row["id"] for row in rows}) == 2
    for words in ((), ("here",)):
        code, complaint = live("status", *words)
        assert code == 2
        assert rows[0]["id"] in complaint
    assert live("status", rows[1]["id"])["id"] == rows[1]["id"]


def test_a_long_clear_lets_everybody_else_through(open_instance: Any, folder: Path) -> None:
    """Questions, workers' results and requests are served while thousands of chunks go."""
    engine = EngineSettings(prefix_cache=False, step_tokens=200)
    instance = open_instance(
        InstanceSettings(engine=engine, slots=20_000), card=CARD, manager_options={"events": 10}
    )
    wait_until(lambda: instance.manager.stats().capacity == 20_000, 20.0, "slots")
    chain = instance.new_chain("old", None)
    chain.extend(list(range(15_000 * CHUNK)))
    _store_all(instance, chain.keys)
    (found,) = find_instances(runtime_root(str(folder), {}))
    done: list[Answer] = []
    between: list[int] = []

    def clear() -> None:
        done.append(ask(found, AskClear(None, "old", None), Cleared, 60.0))

    def look() -> None:
        between.append(ask(found, AskStatus(), Status, 60.0).numbers["resident"])

    asking = [threading.Thread(target=clear), threading.Thread(target=look)]
    with instance.scheduler._lock:  # nothing goes before both questions have arrived
        for each in asking:
            each.start()
            time.sleep(0.2)
    try:
        serve(instance, start=7_000_000, salt="new")
    finally:
        for each in asking:
            each.join()
    assert between[0] > 0
    (answer,) = done
    assert isinstance(answer, Cleared)
    assert answer.removed == 15_000
    assert serve(instance, start=7_000_000, length=3 * CHUNK + 1, salt="new", store=False) == 3 * CHUNK


def _store_all(instance: FakeInstance, keys: list[bytes]) -> None:
    from kvferry.control.outcomes import ChunkWrite

    writes = [
        ChunkWrite(key, keys[depth - 1] if depth else None, depth, CHUNK) for depth, key in enumerate(keys)
    ]
    with instance.scheduler._lock:  # the worker is left out: nobody reads these bytes
        answer = instance.manager.reserve("w", "old", writes, 0.0)
        assert answer.id is not None
        instance.manager.complete(answer.id, range(len(writes)))


def test_a_card_names_the_instance_and_its_tiers() -> None:
    card = msgspec.json.decode(instance_card(Config(instance="a"), "engine-1"), type=Card)
    assert (card.name, card.engine_id, card.pid) == ("a", "engine-1", os.getpid())
    assert msgspec.json.decode(instance_card(Config(), "engine-1"), type=Card).name == "engine-1"


def test_quotas_are_shown_set_enforced_and_forgotten(
    open_instance: Any, folder: Path, live: Callable[..., Any]
) -> None:
    policy = OwnersApart({}, None)
    engine = EngineSettings(prefix_cache=False, step_tokens=200)
    instance = open_instance(
        InstanceSettings(engine=engine, slots=32),
        card=CARD,
        policy=policy,
        manager_options={"quotas": policy, "slot_bytes": 1024},
    )
    serve(instance, salt="a", length=4 * CHUNK)
    serve(instance, salt="b", length=4 * CHUNK)
    assert live("quota", "list")["owners"] == []
    changed = live("quota", "set", "a", "2KiB")
    assert changed["owners"] == [{"owner": "a", "quota": 2048, "held": 2048, "over_quota": 0}]
    assert (changed["others_held"], changed["evicted"]) == (4096, 2)
    serve(instance, salt="a", start=5000, length=5 * CHUNK)
    (found,) = find_instances(runtime_root(str(folder), {}))
    (owner,) = ask(found, AskQuotas(), Quotas).owners
    assert owner.held <= 2048
    assert owner.over_quota > 0
    assert live("status")["numbers"]["over_quota"] == owner.over_quota
    assert live("quota", "set", "--default", "3KiB")["others_held"] == 3072
    assert "3 KiB each" in live("quota", "list", text=True)
    assert live("quota", "forget", "a")["owners"] == []
    assert live("quota", "forget", "a")[0] == 2
    instance.settle()
    instance.check_idle()
