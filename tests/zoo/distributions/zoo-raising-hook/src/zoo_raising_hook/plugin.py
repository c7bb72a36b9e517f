"""One good hook, one good fact and one hook that raises."""

from __future__ import annotations

from kvferry.api import (
    BackendCapabilities,
    BackendSpec,
    Fact,
    HostEnvironment,
    LookupSpec,
    Manifest,
    hookimpl,
)

MANIFEST = Manifest(name="zoo_raising_hook", api=">=1.0,<2", rule_prefix="ZOORAISINGHOOK")


@hookimpl
def kvferry_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="raising-hook",
            factory="zoo_raising_hook.backend:Backend",
            options="zoo_raising_hook.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]


@hookimpl
def kvferry_facts(env: HostEnvironment) -> list[Fact]:
    return [Fact(path="zoo.raising", value=1, origin="probe")]


@hookimpl
def kvferry_lookups() -> list[LookupSpec]:
    raise OSError("no card in slot 3")
