"""Entry module: describes, and imports no implementation."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.api import Manifest, Rule, StagingSpec, hookimpl
from kvferry_host_staging.rules import RULES

MANIFEST = Manifest(
    name="host_staging",
    api=">=1.0,<2",
    rule_prefix="STG",
    summary="host memory that peers read in place of a tier",
)


@hookimpl
def kvferry_stagings() -> Iterable[StagingSpec]:
    return (
        StagingSpec(
            name="host",
            factory="kvferry_host_staging.staging:HostStaging",
            options="kvferry_host_staging.options:HostStagingOptions",
            summary="an arena in host memory, filled by threads of its own",
        ),
    )


@hookimpl
def kvferry_rules() -> Iterable[Rule]:
    return RULES
