"""What several test files of the local channel need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plugins.transport_local.tests.local_bench import Ends


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Opens channels; they are closed at the end of the test."""
    made = Ends()
    yield made
    made.close()
