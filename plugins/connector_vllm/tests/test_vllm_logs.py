"""kvferry's log lines stand in vLLM's log, unless somebody configured it otherwise."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from kvferry_connector_vllm.logs import follow_vllm

PACKAGE = "a_package_of_this_test"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What vLLM's handler writes. No other logger has one."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    vllm = logging.getLogger("vllm")
    monkeypatch.setattr(vllm, "handlers", [handler])
    monkeypatch.setattr(vllm, "level", logging.INFO)
    yield written
    logger = logging.getLogger(PACKAGE)
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def test_lines_of_all_modules_stand_in_vllms_log(
    written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    follow_vllm([PACKAGE])
    follow_vllm([PACKAGE])
    logging.getLogger(f"{PACKAGE}.module").info("a tier is open")
    logging.getLogger(f"{PACKAGE}.module").debug("not of interest")
    assert written.getvalue() == f"INFO {PACKAGE}.module: a tier is open\n"


def test_what_somebody_configured_stays(written: io.StringIO) -> None:
    own = io.StringIO()
    logging.getLogger(PACKAGE).addHandler(logging.StreamHandler(own))
    follow_vllm([PACKAGE])
    logging.getLogger(PACKAGE).warning("here")
    assert (own.getvalue(), written.getvalue()) == ("here\n", "")
