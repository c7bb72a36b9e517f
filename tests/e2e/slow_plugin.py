"""Entry module of a third party's plugin: a tier as slow as a test wants."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(name="acme_slow", api=">=1.0,<2", rule_prefix="ACME", summary="a slow tier")


@hookimpl
def kvferry_backends() -> Iterable[BackendSpec]:
    return (
        BackendSpec(
            name="slow",
            factory="tests.e2e.slow_tier:SlowBackend",
            options="tests.e2e.slow_tier:SlowOptions",
            capabilities=BackendCapabilities(),
            summary="a dictionary behind a wait",
        ),
    )
