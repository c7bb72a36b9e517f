"""Works hard and sleeps while it is imported."""

from __future__ import annotations

import time

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(name="zoo_slow", api=">=1.0,<2", rule_prefix="ZOOSLOW")


@hookimpl
def kvferry_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="slow",
            factory="zoo_slow.backend:Backend",
            options="zoo_slow.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]


_BEGAN = time.thread_time()
while time.thread_time() < _BEGAN + 0.05:
    pass
time.sleep(1.2)
