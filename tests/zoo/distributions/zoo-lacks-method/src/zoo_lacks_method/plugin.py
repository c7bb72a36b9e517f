"""Descriptions without fault, of classes with one."""

from __future__ import annotations

from kvferry.api import BackendCapabilities, BackendSpec, EvictionSpec, Manifest, hookimpl

MANIFEST = Manifest(name="zoo_lacks_method", api=">=1.0,<2", rule_prefix="ZOOLACKSMETHOD")


@hookimpl
def kvferry_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="lacks-method",
            factory="zoo_lacks_method.backend:Backend",
            options="zoo_lacks_method.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]


@hookimpl
def kvferry_evictions() -> list[EvictionSpec]:
    return [
        EvictionSpec(name="forgetful", factory="zoo_lacks_method.policy:Forgetful"),
        EvictionSpec(name="boastful", factory="zoo_lacks_method.policy:Boastful", quotas=True),
    ]
