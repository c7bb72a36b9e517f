"""``kvferry controller``: run the directory of who has what, and ask a running one how it stands."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry.api.units import parse_duration

if TYPE_CHECKING:
    from kvferry_sharing_p2p.controller.server import ControllerServer
    from kvferry_sharing_p2p.directory.answers import DirectoryOptions
    from kvferry_sharing_p2p.network.endpoint import Endpoint
    from kvferry_sharing_p2p.network.secret import SharedSecret

_T = TypeVar("_T")

DEFAULT_LISTEN = "tcp://127.0.0.1:9900"
DEFAULT_HTTP = "127.0.0.1:9901"
OFF = "off"
PAGE_SECONDS = 2.0
"""The page waits so long for the directory."""
FAILED = 1


class ControllerCommand:
    """Takes environment, signals and clock from its process, as it is the process."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.description = (
            "Run the directory that tells instances which of them has which chunks. It holds no data, and "
            "may be killed and started again at any time: instances tell it everything anew."
        )
        parser.add_argument(
            "--listen",
            type=_url,
            default=DEFAULT_LISTEN,
            metavar="URL",
            help=f"where instances find it; the port 0 takes a free one (default: {DEFAULT_LISTEN})",
        )
        parser.add_argument(
            "--http",
            type=_page,
            default=DEFAULT_HTTP,
            metavar="HOST:PORT",
            help=f"where /status and /health are, or 'off' (default: {DEFAULT_HTTP})",
        )
        parser.add_argument(
            "--http-beyond-loopback",
            action="store_true",
            help="let --http name an address that other machines reach; the page asks nobody for a secret",
        )
        _add_secret(parser, "")
        parser.add_argument(
            "--heartbeat",
            type=_seconds,
            default=2.0,
            metavar="DURATION",
            help="how often instances say that they live (default: 2s)",
        )
        parser.add_argument(
            "--limit",
            type=_seconds,
            default=10.0,
            metavar="DURATION",
            help="who was not heard for longer is gone (default: 10s)",
        )
        parser.add_argument(
            "--max-instances",
            type=_count,
            default=1024,
            metavar="N",
            help="how many instances it takes in (default: 1024)",
        )
        actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
        summary = "show how a running controller stands"
        status = actions.add_parser("status", help=summary, description=summary, allow_abbrev=False)
        status.add_argument(
            "--url",
            type=_url,
            default=DEFAULT_LISTEN,
            metavar="URL",
            help=f"where it listens (default: {DEFAULT_LISTEN})",
        )
        status.add_argument(
            "--timeout",
            type=_seconds,
            default=2.0,
            metavar="DURATION",
            help="how long to wait for its answer (default: 2s)",
        )
        status.add_argument("--json", action="store_true", help="print what its page /status shows")
        # Without a default of its own, so that what stands in front of the action stays.
        _add_secret(status, argparse.SUPPRESS)

    def run(self, arguments: argparse.Namespace) -> int:
        """0 after SIGTERM or SIGINT, or with the status printed; 1 when no running controller answers,
        or this one has failed. Raises :class:`kvferry.api.KVFerryError` for what was asked and cannot be
        done."""
        from kvferry_sharing_p2p.network.secret import find_secret

        secret = find_secret(arguments.secret_file, arguments.secret_variable, os.environ)
        if arguments.action == "status":
            return _show_status(arguments, secret)
        return _serve(arguments, secret)


def _show_status(arguments: argparse.Namespace, secret: SharedSecret | None) -> int:
    from kvferry_sharing_p2p.controller.report import status_json, status_text
    from kvferry_sharing_p2p.network.asking import ask_status

    try:
        answer = ask_status(arguments.url, secret, arguments.timeout, random=os.urandom)
    except KVFerryError as error:
        sys.stderr.write(f"{error}\n")
        return FAILED
    if arguments.json:
        text = json.dumps(status_json(answer), indent=2, ensure_ascii=False)
    else:
        text = status_text(answer, arguments.url.url)
    sys.stdout.write(text + "\n")
    return 0


def _serve(arguments: argparse.Namespace, secret: SharedSecret | None) -> int:
    from kvferry_sharing_p2p.controller.page import StatusPage
    from kvferry_sharing_p2p.controller.server import ControllerServer
    from kvferry_sharing_p2p.directory.desk import Desk
    from kvferry_sharing_p2p.directory.messages import EPOCH_BYTES
    from kvferry_sharing_p2p.directory.state import Directory

    options = _directory_options(arguments)
    page_at: Endpoint | None = arguments.http
    _check_page(page_at, arguments.http_beyond_loopback)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_signals(lambda: ended.put(0)))
        directory = Directory(options, os.urandom(EPOCH_BYTES), time.monotonic())
        server = ControllerServer(
            Desk(directory),
            arguments.listen,
            secret,
            clock=time.monotonic,
            on_failed=lambda: ended.put(FAILED),
        )
        stack.callback(server.close)
        listening = server.open()
        told = f"controller ready at {listening.url}, " + ("with" if secret else "without") + " a secret"
        if page_at is not None:
            page = StatusPage(page_at, functools.partial(_page_status, server))
            stack.callback(page.close)
            told += f", status at http://{page.open()}/status"
        sys.stdout.write(told + "\n")
        sys.stdout.flush()
        return ended.get()


def _page_status(server: ControllerServer) -> dict[str, object] | None:
    from kvferry_sharing_p2p.controller.report import status_json

    answer = server.status(PAGE_SECONDS)
    return None if answer is None else status_json(answer)


def _directory_options(arguments: argparse.Namespace) -> DirectoryOptions:
    from kvferry_sharing_p2p.directory.answers import DirectoryOptions

    return DirectoryOptions(
        heartbeat_seconds=arguments.heartbeat,
        limit_seconds=arguments.limit,
        max_instances=arguments.max_instances,
    )


def _check_page(listen: Endpoint | None, allowed: bool) -> None:
    if listen is None or allowed:
        return
    # A name that cannot be resolved is told when it is listened at.
    with contextlib.suppress(OSError):
        if not listen.resolved().is_loopback():
            raise KVFerryError(
                f"the page of status at {listen} could be read by other machines",
                kind=ErrorKind.CONFIG,
                where="--http",
                why="it asks nobody for a secret, and shows which instances there are",
                remedy="name a loopback address, or say --http-beyond-loopback if that is meant",
                retry=Retry.AFTER_CHANGE,
            )


@contextlib.contextmanager
def _signals(end: Callable[[], None]) -> Iterator[None]:
    """``end`` is called for SIGTERM and SIGINT, between any two steps of the main thread."""
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = {kind: signal.signal(kind, lambda _number, _frame: end()) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _add_secret(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--secret-file",
        default=default,
        metavar="FILE",
        help="file with the secret that the controller and all instances share",
    )
    parser.add_argument(
        "--secret-variable", default=default, metavar="NAME", help="environment variable that holds it"
    )


def _url(text: str) -> Endpoint:
    from kvferry_sharing_p2p.network.endpoint import parse_url

    return _or_usage(parse_url, text)


def _page(text: str) -> Endpoint | None:
    from kvferry_sharing_p2p.network.endpoint import parse_host_port

    return None if text == OFF else _or_usage(parse_host_port, text)


def _seconds(text: str) -> float:
    seconds = _or_usage(parse_duration, text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _or_usage(read: Callable[[str], _T], text: str) -> _T:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
