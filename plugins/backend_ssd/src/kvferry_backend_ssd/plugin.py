"""Entry module: describes, and imports no implementation."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.api import (
    BackendCapabilities,
    BackendSpec,
    Fact,
    FactSpec,
    HostEnvironment,
    Manifest,
    Rule,
    hookimpl,
)
from kvferry_backend_ssd.facts import FACT_SPECS, probe_facts
from kvferry_backend_ssd.rules import RULES

MANIFEST = Manifest(
    name="backend_ssd",
    api=">=1.0,<2",
    rule_prefix="SSD",
    summary="a folder on an SSD as a persistent tier",
)


@hookimpl
def kvferry_backends() -> Iterable[BackendSpec]:
    return (
        BackendSpec(
            name="ssd",
            factory="kvferry_backend_ssd.backend:SSDBackend",
            options="kvferry_backend_ssd.options:SSDOptions",
            capabilities=BackendCapabilities(persistent=True, needs_host_buffer=True),
            summary="slots in one large file on a local disk",
        ),
    )


@hookimpl
def kvferry_facts(env: HostEnvironment) -> Iterable[Fact]:
    return tuple(probe_facts(env))


@hookimpl
def kvferry_fact_specs() -> Iterable[FactSpec]:
    return FACT_SPECS


@hookimpl
def kvferry_rules() -> Iterable[Rule]:
    return RULES
