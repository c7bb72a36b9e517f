"""Short spellings of core's own keys: an eviction policy by its name, a plugin by its name."""

from __future__ import annotations

from attrs import evolve

from kvferry.config.nodes import Node


def expanded(root: Node) -> Node:
    """The tree of one source with short spellings written out, so that sources can be merged."""
    if not isinstance(root.value, dict):
        return root
    top = dict(root.value)
    tiers = top.get("tiers")
    if tiers is not None and isinstance(tiers.value, dict):
        inner = {name: _expanded_tier(tier) for name, tier in tiers.value.items()}
        top["tiers"] = evolve(tiers, value=inner)
    plugins = top.get("plugins")
    if plugins is not None and isinstance(plugins.value, tuple):
        top["plugins"] = evolve(plugins, value=tuple(map(_expanded_plugin, plugins.value)))
    return evolve(root, value=top)


def _expanded_tier(tier: Node) -> Node:
    eviction = tier.value.get("eviction") if isinstance(tier.value, dict) else None
    if eviction is None or not isinstance(eviction.value, str):
        return tier
    assert isinstance(tier.value, dict)
    inner = evolve(eviction, key_place=eviction.place)
    return evolve(
        tier, value={**tier.value, "eviction": evolve(eviction, value={"use": inner}, quoted=False)}
    )


def _expanded_plugin(entry: Node) -> Node:
    keys = entry.value
    if isinstance(keys, str):
        keys = {"name": evolve(entry, key_place=entry.place)}
    if not isinstance(keys, dict):
        return entry
    name = keys.get("name")
    if name is not None and isinstance(name.value, str) and "distribution" not in keys:
        plugin, at, distribution = name.value.partition("@")
        if at:
            keys = {
                **keys,
                "name": evolve(name, value=plugin),
                "distribution": evolve(name, value=distribution),
            }
    return evolve(entry, value=keys, quoted=False)
