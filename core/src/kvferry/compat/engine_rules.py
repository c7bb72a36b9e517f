"""CORE020 to CORE039: what must hold between the configuration and the engine."""

from __future__ import annotations

from kvferry.api import Check, Example, Known, Rule, Severity
from kvferry.compat.tier_rules import SUPPORTED_ENGINE, SUPPORTED_GROUP_KINDS, WITH_ENGINE

HOST_DEVICE = "cpu"


def _blocks(block: int, chunk: int, *kinds: str) -> dict[str, object]:
    return {
        "engine.block_tokens": block,
        "engine.group_kinds": kinds or ("full",),
        "chunk_tokens": chunk,
    }


ENGINE_RULES = (
    Rule(
        id="CORE020",
        severity=Severity.ERROR,
        waivable=False,
        when=WITH_ENGINE & SUPPORTED_ENGINE,
        require=Check(
            "chunk_tokens is a multiple of engine.block_tokens",
            ("chunk_tokens", "engine.block_tokens"),
            lambda chunk, block: chunk > 0 and block > 0 and chunk % block == 0,
        ),
        message="chunk_tokens is {chunk_tokens}, which is not a whole number of the engine's "
        "blocks of {engine.block_tokens} tokens",
        fix="set chunk_tokens to a multiple of {engine.block_tokens}",
        source="design",
        examples=(
            Example(facts=_blocks(128, 256), passes=True),
            Example(facts=_blocks(128, 192), passes=False),
            Example(facts=_blocks(544, 256, "full", "mamba"), passes=True),
            Example(facts={**_blocks(0, 256), "engine.group_kinds": ()}, passes=True),
        ),
    ),
    Rule(
        id="CORE023",
        severity=Severity.ERROR,
        when=Known("engine.device") | WITH_ENGINE,
        require=Check(
            "engine.device is host memory or a listed plugin brings its DeviceSpec",
            ("engine.device", "devices.*.name"),
            lambda device, names: device == HOST_DEVICE or device in names,
        ),
        message="the engine keeps its KV cache on device {engine.device}, and no listed plugin "
        "knows that device (known besides cpu: {devices.*.name})",
        fix="list the plugin for this device under plugins, or run the engine on cpu",
        source="design",
        examples=(
            Example(facts={"engine.device": "cpu"}, passes=True),
            Example(facts={"engine.device": "npu", "devices.npu.name": "npu"}, passes=True),
            Example(facts={"engine.device": "npu"}, passes=False),
        ),
    ),
    Rule(
        id="CORE024",
        severity=Severity.NOTE,
        when=Known("engine.group_kinds") | WITH_ENGINE,
        require=Check(
            "every one of engine.group_kinds is full, mla or sliding",
            ("engine.group_kinds",),
            lambda kinds: all(kind in SUPPORTED_GROUP_KINDS for kind in kinds),
        ),
        message="the model has KV cache groups of the kinds {engine.group_kinds}; only full "
        "attention, MLA and sliding windows can be restored, so this engine gets no hits and stores nothing",
        fix="nothing to mend: output is right either way; remove the connector to save its start-up",
        source="design",
        examples=(
            Example(facts={"engine.group_kinds": ("full", "sliding")}, passes=True),
            Example(facts={"engine.group_kinds": ("full", "mamba")}, passes=False),
        ),
    ),
    Rule(
        id="CORE025",
        severity=Severity.NOTE,
        when=Check("plugins are listed", ("plugins.*.name",), lambda names: len(names) > 0)
        & Known("listed.connectors"),
        require=Check(
            "a listed plugin provides a connector",
            ("listed.connectors",),
            lambda connectors: len(connectors) > 0,
        ),
        message="no listed plugin connects an engine (listed: {plugins.*.name}), so no rule of a connector "
        "judges this file",
        fix="list the connector's plugin too; nothing to mend if the engine's side is not configured here",
        source="design",
        examples=(
            Example(facts={"plugins.0.name": "of_an_engine", "listed.connectors": ("engine",)}, passes=True),
            Example(facts={"plugins.0.name": "of_a_tier", "listed.connectors": ()}, passes=False),
            Example(facts={"listed.connectors": ()}, passes=True),
        ),
    ),
)
