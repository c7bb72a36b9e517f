"""Pulls a library that only its implementation needs."""

from __future__ import annotations

import zmq

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(name="zoo_heavy", api=">=1.0,<2", rule_prefix="ZOOHEAVY")


@hookimpl
def kvferry_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="heavy",
            factory="zoo_heavy.backend:Backend",
            options="zoo_heavy.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]


CONTEXT = zmq.Context
