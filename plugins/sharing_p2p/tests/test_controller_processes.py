"""The controller as a process, instances over real sockets, and what can happen between them."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from attrs import frozen

from kvferry.cli.main import main
from kvferry.testing.tcp_proxy import TCPProxy
from kvferry_sharing_p2p.directory.publisher import PublisherState
from kvferry_sharing_p2p.network.endpoint import Endpoint
from kvferry_sharing_p2p.network.finds import Unanswered
from kvferry_sharing_p2p.network.reach import Reach
from kvferry_sharing_p2p.network.secret import SharedSecret
from plugins.sharing_p2p.tests.controller_sides import (
    OTHER_SECRET,
    PATIENCE,
    SECRET,
    ControllerProcess,
    Instance,
    prompt,
    until,
)


@frozen
class Ran:
    """What a run of the command left behind."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``kvferry controller`` inside of this process, which is quicker, for what ends by itself."""

    def call(*words: str) -> Ran:
        capsys.readouterr()
        code = main(["controller", *words])
        told = capsys.readouterr()
        return Ran(code, told.out, told.err)

    return call


def get(page: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(page).netloc, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def names(page: str) -> list[str]:
    return [row["instance"] for row in json.loads(get(page, "/status")[1])["instances"]]


def test_what_one_instance_publishes_another_finds_and_operators_see(run: Run) -> None:
    with ControllerProcess() as controller, Instance("a", controller.endpoint) as a:
        a.store(prompt(1))
        with Instance("b", controller.endpoint) as b:
            b.sees(prompt(1), {"a": 8})
            b.store(prompt(1, 3))
            with Instance("c", controller.endpoint) as c:
                c.sees(prompt(1), {"a": 8, "b": 3})
                a.evict(prompt(1)[5:])
                c.sees(prompt(1), {"a": 5, "b": 3})
            b.settle()
            a.settle()

            shown = run("status", "--url", controller.endpoint.url, "--json")
            assert (shown.returncode, shown.stderr) == (0, "")
            status = json.loads(shown.stdout)
            assert status["schema"] == 1
            rows = {row["instance"]: row for row in status["instances"]}
            assert set(rows) == {"a", "b"}
            assert (rows["a"]["keys"], rows["a"]["lag"], rows["a"]["sync"]) == (5, 0, "current")
            assert rows["a"]["handed_out"] >= 2
            code, body = get(controller.page, "/status")
            page = json.loads(body)
            assert code == 200
            for each in (status, page):
                for row in each["instances"]:
                    del row["heard_seconds"]
            assert page == status

            text = run("status", "--url", controller.endpoint.url).stdout
            lines = [line.split() for line in text.splitlines()]
            assert lines[2] == ["INSTANCE", "EPOCH", "KEYS", "LAG", "SYNC", "HEARD", "HANDED", "OUT"]
            assert lines[3][:5] == ["a", rows["a"]["epoch"][:8], "5", "0", "current"]
            assert ["hits", str(status["totals"]["hits"])] in lines
        until(lambda: names(controller.page) == ["a"], "b has left in order")
        assert get(controller.page, "/health") == (200, b"ok\n")


def test_after_a_restart_the_controller_is_told_everything_without_help() -> None:
    with ControllerProcess() as first:
        port = first.endpoint.port
        with Instance("a", first.endpoint) as a, Instance("b", first.endpoint) as b:
            for number in range(20):
                a.store(prompt(number))
            b.store(prompt(3, 4))
            b.sees(prompt(19), {"a": 8})
            first.signal(signal.SIGKILL)
            first.ended()
            until(lambda: b.find(prompt(19)) is Unanswered.GONE, "b knows that the controller is gone")
            # What happens while there is no directory counts as well.
            a.store(prompt(40))
            a.evict(prompt(0))
            until(lambda: not a.is_current(), "a knows that nobody was told")
            with ControllerProcess(port=port):
                b.sees(prompt(40), {"a": 8})
                b.sees(prompt(19), {"a": 8})
                b.sees(prompt(0), {})
                a.sees(prompt(3), {"b": 4})
                a.settle()


def test_a_controller_that_stands_still_costs_its_answers_and_nothing_else(run: Run) -> None:
    with (
        ControllerProcess() as controller,
        Instance("a", controller.endpoint) as a,
        Instance("b", controller.endpoint, silent_seconds=0.5) as b,
    ):
        a.store(prompt(1))
        b.sees(prompt(1), {"a": 8})
        controller.signal(signal.SIGSTOP)
        assert b.find(prompt(1), seconds=0.2) is Unanswered.DEADLINE
        # Later ones need not wait for that any more, although nobody has closed the connection.
        until(lambda: b.client.status().reach is Reach.SILENT, "b takes it for gone")
        assert b.find(prompt(1)) is Unanswered.GONE
        assert run("status", "--url", controller.endpoint.url, "--timeout", "200ms").returncode == 1
        a.store(prompt(2))
        controller.signal(signal.SIGCONT)
        b.sees(prompt(1), {"a": 8})
        b.sees(prompt(2), {"a": 8})


def test_a_partition_costs_answers_until_it_has_healed() -> None:
    with ControllerProcess() as controller, Instance("a", controller.endpoint) as a:
        a.store(prompt(1))
        target = (controller.endpoint.host, controller.endpoint.port)
        with TCPProxy(target) as proxy, Instance("b", Endpoint(*proxy.address)) as b:
            b.store(prompt(2))
            b.sees(prompt(1), {"a": 8})
            proxy.hold()
            assert b.find(prompt(1), seconds=0.2) is Unanswered.DEADLINE
            a.store(prompt(3))
            b.store(prompt(4))
            proxy.hold(held=False)
            b.sees(prompt(3), {"a": 8})
            a.sees(prompt(4), {"b": 8})
            # Everything that was under way is lost with its connection.
            proxy.hold()
            b.store(prompt(5))
            proxy.cut()
            proxy.hold(held=False)
            a.sees(prompt(5), {"b": 8})
            b.sees(prompt(3), {"a": 8})


def test_of_two_instances_with_one_id_the_first_stays_and_the_other_learns_why() -> None:
    with (
        ControllerProcess("--limit", "1s") as controller,
        Instance("watcher", controller.endpoint) as watcher,
        Instance("a", controller.endpoint) as first,
    ):
        first.store(prompt(1))
        first.settle()
        with Instance("a", controller.endpoint) as second:
            second.store(prompt(2))
            until(
                lambda: second.client.status().publisher.state is PublisherState.REFUSED,
                "the second is refused",
            )
            assert "another instance named 'a'" in second.client.status().publisher.refusal
            assert watcher.holders(prompt(2)) == {}
            watcher.sees(prompt(1), {"a": 8})
            first.client.close(time.monotonic() + PATIENCE)
            watcher.sees(prompt(2), {"a": 8})
            watcher.sees(prompt(1), {})


def test_who_does_not_know_the_secret_is_not_answered(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET.value + b"\n")
    with (
        ControllerProcess("--secret-file", str(file)) as controller,
        Instance("a", controller.endpoint, SECRET) as a,
        Instance("b", controller.endpoint, OTHER_SECRET) as b,
        Instance("c", controller.endpoint) as c,
    ):
        assert "with a secret" in controller.told
        a.store(prompt(1))
        a.settle()
        for stranger in (b, c):
            until(
                lambda one=stranger: one.client.status().reach is Reach.TURNED_AWAY,  # type: ignore[misc]
                "it is turned away",
            )
            assert stranger.find(prompt(1)) is Unanswered.GONE
        time.sleep(0.3)  # for more attempts, of which the log is to say nothing
        told = [record.message for record in caplog.records if "secret is wrong" in record.message]
        assert len(told) == 2
        url = controller.endpoint.url
        refused = run("status", "--url", url, "--timeout", "500ms")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "its secret is another one" in refused.stderr
        assert run("--secret-file", str(file), "status", "--url", url).returncode == 0
        assert run("status", "--url", url, "--secret-file", str(file)).returncode == 0
        with Instance("d", controller.endpoint, SharedSecret(SECRET.value)) as d:
            d.sees(prompt(1), {"a": 8})


def test_addresses_in_use_are_refused_and_free_when_the_controller_has_ended(run: Run) -> None:
    with ControllerProcess() as controller:
        url = controller.endpoint.url
        taken = run("--listen", url, "--http", "off")
        assert taken.returncode == 2
        assert f"cannot listen at {url}" in taken.stderr
        page = urlsplit(controller.page).netloc
        taken = run("--listen", "tcp://127.0.0.1:0", "--http", page)
        assert taken.returncode == 2
        assert taken.stdout == ""
        assert f"cannot listen at {page}" in taken.stderr
        controller.signal(signal.SIGTERM)
        assert controller.ended() == 0
        with ControllerProcess(port=controller.endpoint.port) as second:
            second.signal(signal.SIGINT)
            assert second.ended() == 0


def test_instances_that_are_connected_do_not_keep_a_controller_from_ending() -> None:
    with ControllerProcess() as controller, Instance("a", controller.endpoint) as a:
        a.store(prompt(1))
        a.settle()
        controller.signal(signal.SIGTERM)
        assert controller.ended() == 0
        until(lambda: a.client.status().reach is Reach.NO_ANSWER, "a knows that it is gone")


def test_ipv6_and_names_can_be_listened_at(run: Run) -> None:
    with ControllerProcess("--listen", "tcp://[::1]:0") as controller:
        assert controller.told.startswith("controller ready at tcp://[::1]:")
        with Instance("a", controller.endpoint) as a:
            a.settle()
        assert run("status", "--url", controller.endpoint.url).returncode == 0
    with ControllerProcess("--listen", "tcp://localhost:0") as controller:
        assert run("status", "--url", controller.endpoint.url).returncode == 0
