"""A hook that wants more than the contract hands over."""

from __future__ import annotations

from kvferry.api import Fact, HostEnvironment, Manifest, hookimpl

MANIFEST = Manifest(name="zoo_wrong_signature", api=">=1.0,<2", rule_prefix="ZOOWRONGSIGNATURE")


@hookimpl
def kvferry_facts(env: HostEnvironment, engine: object) -> list[Fact]:
    return [Fact(path="zoo.engine", value=str(engine), origin=env.root)]
