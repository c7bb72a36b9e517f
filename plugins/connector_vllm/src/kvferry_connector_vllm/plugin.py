"""Entry module: what this plugin offers, without importing vLLM."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.api import (
    Check,
    ConnectorSpec,
    Example,
    FactKind,
    FactSource,
    FactSpec,
    Known,
    Manifest,
    Path,
    Rule,
    Severity,
    hookimpl,
)

MANIFEST = Manifest(
    name="connector_vllm",
    api=">=1.0,<2",
    rule_prefix="VLLM",
    summary="lets vLLM reuse KV cache from kvferry's tiers",
)


@hookimpl
def kvferry_connectors() -> Iterable[ConnectorSpec]:
    return [
        ConnectorSpec(
            name="vllm",
            options="kvferry_connector_vllm.options:VLLMConnectorOptions",
            summary="connector KVFerryConnector of vLLM's KV transfer interface",
        )
    ]


@hookimpl
def kvferry_fact_specs() -> Iterable[FactSpec]:
    return [
        FactSpec(
            path=path,
            kind=kind,
            meaning=meaning,
            source=FactSource.ENGINE,
            sample=sample,
            at_least=1 if kind is FactKind.COUNT else None,
        )
        for path, kind, sample, meaning in (
            ("engine.groups", FactKind.COUNT, "1", "KV cache groups of the model"),
            (
                "engine.sync_loads",
                FactKind.TEXT,
                "possible",
                "'possible', or why vLLM cannot be told of a synchronous load that failed",
            ),
            ("engine.kv_role", FactKind.TEXT, "kv_both", "kv_role in vLLM's kv_transfer_config"),
            (
                "engine.kv_load_failure_policy",
                FactKind.TEXT,
                "recompute",
                "what vLLM does with a request whose load failed; MultiConnector's own word where it stands",
            ),
        )
    ]


@hookimpl
def kvferry_rules() -> Iterable[Rule]:
    return [
        Rule(
            id="VLLM001",
            severity=Severity.ERROR,
            when=Known("engine.kv_load_failure_policy"),
            require=Path("engine.kv_load_failure_policy") == "recompute",
            message="kv_load_failure_policy is {engine.kv_load_failure_policy}: a chunk that cannot be "
            "loaded would end the client's request with an error, so that an outage of the cache becomes "
            "one of the service",
            fix='put "kv_load_failure_policy": "recompute" into --kv-transfer-config; beside other '
            "connectors, into MultiConnector's own entry as well as into kvferry's",
            source="upstream-code vLLM 0.32 v1/core/sched/scheduler.py, which reads the outer entry only",
            examples=(
                Example(facts={"engine.kv_load_failure_policy": "recompute"}, passes=True),
                Example(facts={"engine.kv_load_failure_policy": "fail"}, passes=False),
            ),
        ),
        Rule(
            id="VLLM002",
            severity=Severity.ERROR,
            when=Known("engine.kv_role"),
            require=Path("engine.kv_role") == "kv_both",
            message="a cache stores and loads, so its kv_role is kv_both, not {engine.kv_role}",
            fix='put "kv_role": "kv_both" into --kv-transfer-config',
            source="upstream-code vLLM 0.32 config/kv_transfer.py",
            examples=(
                Example(facts={"engine.kv_role": "kv_both"}, passes=True),
                Example(facts={"engine.kv_role": "kv_producer"}, passes=False),
            ),
        ),
        Rule(
            id="VLLM003",
            severity=Severity.NOTE,
            when=Known("engine.sync_loads") & (Path("connector.load") == "sync"),
            require=Path("engine.sync_loads") == "possible",
            message="loads are asynchronous in spite of connector.load: sync: {engine.sync_loads}",
            fix="set connector.load: async",
            source="upstream-code vLLM 0.23 and 0.32 v1/core/sched/scheduler.py: failed blocks of "
            "synchronous loads can be reported for models with one group only, what a window needs is gone "
            "then, and tokens of a step that was scheduled meanwhile are taken for good",
            examples=(
                Example(facts={"engine.sync_loads": "possible", "connector.load": "sync"}, passes=True),
                Example(
                    facts={"engine.sync_loads": "the model has a sliding window", "connector.load": "sync"},
                    passes=False,
                ),
            ),
        ),
        Rule(
            id="VLLM004",
            severity=Severity.WARNING,
            when=Known("connector.verify"),
            require=Path("connector.verify") == False,  # noqa: E712 - builds a formula
            message="connector.verify digests every block twice, which costs more than the copy",
            fix="use it to find a fault, then set connector.verify: false",
            source="measured: make bench, row verify",
            examples=(
                Example(facts={"connector.verify": False}, passes=True),
                Example(facts={"connector.verify": True}, passes=False),
            ),
        ),
        Rule(
            id="VLLM005",
            severity=Severity.NOTE,
            when=Known("connector.load")
            & (Path("connector.load") == "sync")
            & Check("p2p.use is set", ("p2p.use",), lambda use: use is not None),
            require=Path("p2p.delay") == False,  # noqa: E712 - builds a formula
            message="with p2p.delay the loads of chunks that peers have run beside the forward pass, in "
            "spite of connector.load: sync",
            fix="nothing to mend; load: async says so for all loads",
            source="design",
            examples=(
                Example(facts={"connector.load": "sync", "p2p.use": "p2p", "p2p.delay": False}, passes=True),
                Example(facts={"connector.load": "sync", "p2p.use": "p2p", "p2p.delay": True}, passes=False),
            ),
        ),
    ]
