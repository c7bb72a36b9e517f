"""For every suite of the repository."""

import pytest
from hypothesis import settings

from tests.vllm_features import missing

# Time per example says something about the machine, nothing about the code.
settings.register_profile("kvferry", settings.default, deadline=None)
settings.load_profile("kvferry")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = missing(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
