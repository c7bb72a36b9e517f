"""Entry module: describes, and imports no implementation."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.api import (
    BackendCapabilities,
    BackendSpec,
    Manifest,
    Rule,
    hookimpl,
)
from kvferry_backend_cpu.rules import RULES

MANIFEST = Manifest(
    name="backend_cpu",
    api=">=1.0,<2",
    rule_prefix="CPU",
    summary="CPU memory as a tier",
)


@hookimpl
def kvferry_backends() -> Iterable[BackendSpec]:
    return (
        BackendSpec(
            name="cpu",
            factory="kvferry_backend_cpu.backend:CPUBackend",
            options="kvferry_backend_cpu.options:CPUOptions",
            capabilities=BackendCapabilities(addressable=True, servable_to_peers=True),
            summary="slots in a memory file of this host",
        ),
    )


@hookimpl
def kvferry_rules() -> Iterable[Rule]:
    return RULES
