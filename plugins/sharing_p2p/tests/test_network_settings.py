"""Addresses, secrets and the options of the lookup."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import ErrorKind, KVFerryError
from kvferry_sharing_p2p.network.endpoint import Endpoint, parse_host_port, parse_url
from kvferry_sharing_p2p.network.options import ControllerOptions
from kvferry_sharing_p2p.network.secret import (
    LARGEST_BYTES,
    LEAST_BYTES,
    SharedSecret,
    find_secret,
    secret_of_file,
    secret_of_variable,
)

HOSTS = st.sampled_from(["10.0.0.1", "::1", "fe80::1%eth0", "localhost", "node-1.example", "0.0.0.0"])
LONG = b"x" * LEAST_BYTES


@given(host=HOSTS, port=st.integers(0, 65535))
def test_an_address_reads_as_it_is_written(host: str, port: int) -> None:
    endpoint = Endpoint(host, port)
    assert parse_host_port(str(endpoint)) == endpoint
    assert parse_url(endpoint.url) == endpoint


@given(st.text(max_size=30) | st.from_regex(r"(tcp://)?\[?[a-z0-9.:]{0,12}\]?:?[0-9]{0,6}", fullmatch=True))
def test_an_address_is_read_or_refused_with_a_sentence(text: str) -> None:
    for read in (parse_url, parse_host_port):
        told = ""
        try:
            endpoint = read(text)
        except ValueError as error:
            told = str(error)
        if not told:
            assert endpoint.host
            assert 0 <= endpoint.port <= 65535
        else:
            assert len(told.split()) > 3


@pytest.mark.parametrize(
    ("text", "loopback", "wildcard"),
    [
        ("127.0.0.1:1", True, False),
        ("127.9.9.9:1", True, False),
        ("[::1]:1", True, False),
        ("10.0.0.1:1", False, False),
        ("0.0.0.0:1", False, True),
        ("[::]:1", False, True),
        ("somewhere:1", False, False),
    ],
)
def test_what_others_reach_is_known(text: str, loopback: bool, wildcard: bool) -> None:
    endpoint = parse_host_port(text)
    assert (endpoint.is_loopback(), endpoint.wildcard) == (loopback, wildcard)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("10.0.0.1:9900", "does not begin with tcp://"),
        ("ipc:///tmp/x", "does not begin with tcp://"),
        ("tcp://10.0.0.1", "has no port"),
        ("tcp://0.0.0.0:9900", "nobody can reach"),
        ("tcp://10.0.0.1:0", "port 0"),
        ("tcp://::1:9900", "brackets"),
    ],
)
def test_an_url_that_cannot_be_used_is_refused_by_the_options(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        ControllerOptions(url=text)
    assert getattr(refused.value, "remedy", "")


def test_a_secret_in_place_of_its_variable_is_refused() -> None:
    with pytest.raises(ValueError, match="no name of an environment variable") as refused:
        ControllerOptions(secret_variable="my secret=1")
    assert "my secret" not in str(refused.value)


def test_a_secret_is_the_same_from_a_file_and_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(LONG + b"\r\n")
    assert secret_of_file(str(file)).value == secret_of_variable("S", {"S": LONG.decode()}).value == LONG
    assert find_secret("", "", {}) is None
    assert "x" * LEAST_BYTES not in repr(secret_of_file(str(file)))


@given(st.integers(0, LARGEST_BYTES + 100))
def test_only_secrets_of_a_good_length_are_taken(size: int) -> None:
    if LEAST_BYTES <= size <= LARGEST_BYTES:
        assert SharedSecret(b"x" * size).value
        return
    with pytest.raises(KVFerryError) as refused:
        SharedSecret(b"x" * size, "here")
    assert (refused.value.kind, refused.value.where) == (ErrorKind.CONFIG, "here")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(KVFerryError, match="cannot be read") as refused:
            secret_of_file(str(path))
        assert refused.value.where == str(path)
    long = tmp_path / "long"
    long.write_bytes(b"x" * 100_000)
    with pytest.raises(KVFerryError, match="too long"):
        secret_of_file(str(long))


def test_a_zeromq_that_cannot_encrypt_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        for protect in (
            SharedSecret(LONG).protect_server,
            lambda one: SharedSecret(LONG).protect_client(one, os.urandom(32)),
        ):
            with pytest.raises(KVFerryError) as refused:
                protect(socket)
            assert refused.value.kind is ErrorKind.UNSUPPORTED
            assert "pyzmq" in refused.value.remedy


LISTENED = ("0.0.0.0", "127.0.0.1", "127.0.0.2", "10.0.0.1", "localhost", "node-1", "::", "::1")


@given(st.sampled_from(LISTENED), st.sampled_from(LISTENED), st.integers(0, 3), st.integers(0, 3))
def test_two_exclude_each_other_or_neither_does(one: str, other: str, port: int, other_port: int) -> None:
    mine, theirs = Endpoint(one, port), Endpoint(other, other_port)
    assert mine.excludes(theirs) == theirs.excludes(mine)
    if port != other_port or port == 0:
        assert not mine.excludes(theirs)
    elif one == other:
        assert mine.excludes(theirs)
