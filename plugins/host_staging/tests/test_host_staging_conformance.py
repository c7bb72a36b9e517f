"""The kit's laws, put to the staging with kvferry-native and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.api import Staging
from kvferry.testing.conformance import ManifestConformance, StagingConformance
from kvferry.testing.conformance.staging import CAPACITY
from kvferry_host_staging.moving import SystemMovement
from kvferry_host_staging.options import HostStagingOptions
from kvferry_host_staging.staging import HostStaging


class TestHostStagingManifest(ManifestConformance):
    plugin = "host_staging"


class TestHostStaging(StagingConformance):
    plugin = "host_staging"
    staging = "host"


class TestHostStagingOfTheCLibrary(StagingConformance):
    """As where kvferry-native is not installed."""

    plugin = "host_staging"
    staging = "host"

    @pytest.fixture
    def make(self) -> Callable[[], Staging]:
        return lambda: HostStaging(HostStagingOptions(), CAPACITY, movement=SystemMovement())
