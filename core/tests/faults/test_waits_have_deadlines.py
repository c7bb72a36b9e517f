"""Nothing waits for ever: whoever waits without a deadline is named here, with the reason."""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry

PACKAGES = ("kvferry", "kvferry_backend_cpu", "kvferry_connector_vllm", "kvferry_eviction_policies")
# Calls that wait, and how many arguments they have when one of them says for how long.
WAITS = {"wait": 1, "wait_for": 2, "join": 1, "acquire": 1, "poll": 1, "result": 1, "select": 1}
# Calls that only wait without end, or say that they do not.
WAITS |= dict.fromkeys(("recv", "recvmsg", "recv_multipart", "accept", "communicate", "term"), 99)
SAYS_HOW_LONG = {"timeout", "blocking", "NOBLOCK"}

ALLOWED = {
    "api.threaded ThreadedBackend._work wait": "threads of their own that wait for work, or for their end",
    "api.threaded ThreadedBackend.close join": "no batch is under way any more, or it has given up before",
    "data.arena MemoryFileArena.close join": "the touching thread looks at the wish to close every 2 MiB",
    "data.handover _receive recv": "the socket is the caller's, and so is its timeout",
    "data.handover _receive_frame recvmsg": "the socket is the caller's, and so is its timeout",
    "data.landing Landing._land wait": "a reading ends soon after its deadline, whatever becomes of it",
    "data.landing Landing._next wait": "a thread of its own that waits for work, or for its end",
    "data.landing Landing.settle wait": "the channel is closed, so that every reading fails at once",
    "data.mover Mover._next wait": "a thread of its own that waits for work, or for its end",
    "data.mover Mover.finish_saves wait_for": "one piece of 8 MiB, which cannot be left half copied",
    "data.peer_links PeerLinks.finish_closing wait": "the channel is closed, and others tell the rest",
    "data.staging_side StagingSide.close wait": "the staging is closed, and others tell the rest",
    "runtime.fair_lock FairLock.__enter__ acquire": "every holder lets go within a slice",
    "runtime.instances _exchange recv": "only after poll has said that an answer is there",
    "runtime.side_channel SideChannelClient.close join": "its thread wakes at once",
    "runtime.side_channel SideChannelClient.close term": "its socket is closed, and lingers for 0.2 s",
    "runtime.side_channel SideChannelServer.close join": "its thread wakes at once",
    "runtime.side_channel SideChannelServer.close term": "its socket is closed, and does not linger",
    "runtime.side_channel SideChannelServer.open term": "its socket is closed, and does not linger",
}


def unbounded(tree: ast.AST, scope: str = "") -> Iterator[str]:
    """Calls that may wait without end, by where they stand."""
    for node in ast.iter_child_nodes(tree):
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = f"{scope}.{node.name}" if scope else node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            said = {keyword.arg for keyword in node.keywords}
            said |= {each.attr for each in node.args if isinstance(each, ast.Attribute)}
            if len(node.args) < WAITS.get(node.func.attr, 0) and not SAYS_HOW_LONG & said:
                yield f"{scope} {node.func.attr}"
        yield from unbounded(node, inner)


def test_every_wait_has_a_deadline_or_a_reason() -> None:
    """An allocation that polls until memory is free freezes the engine (LMCache#2942)."""
    found: Counter[str] = Counter()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None:  # only the core is installed here
            continue
        for root in spec.submodule_search_locations or ():
            for path in Path(root).rglob("*.py"):
                module = ".".join(path.relative_to(root).with_suffix("").parts)
                if package == "kvferry" and module.startswith("testing."):
                    continue
                found.update(f"{module} {call}" for call in unbounded(ast.parse(path.read_text())))
    reasons = Counter(ALLOWED.keys())  # one wait for each
    assert found - reasons == Counter(), "give these a deadline, or say why they need none"
    assert reasons - found == Counter(), "these are gone; take them off the list"


@pytest.mark.parametrize(
    ("code", "waits"),
    [
        ("thread.join()", True),
        ("thread.join(5)", False),
        ("', '.join(names)", False),
        ("lock.acquire()", True),
        ("lock.acquire(timeout=1)", False),
        ("changed.wait_for(ready)", True),
        ("changed.wait_for(ready, 1.0)", False),
        ("socket.recv(4096)", True),
        ("socket.recv(zmq.NOBLOCK)", False),
        ("queue.put(1)", False),
    ],
)
def test_the_search_knows_a_wait_when_it_sees_one(code: str, waits: bool) -> None:
    assert bool(list(unbounded(ast.parse(code)))) is waits


def test_the_search_has_something_to_search() -> None:
    assert len(list(Path(kvferry.__path__[0]).rglob("*.py"))) > 50
