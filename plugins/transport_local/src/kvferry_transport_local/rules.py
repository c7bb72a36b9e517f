"""LOC001 and following: what must hold for a channel between processes of one host."""

from __future__ import annotations

from kvferry.api import Example, Known, Path, Rule, Severity
from kvferry_transport_local.facts import CROSS_PROCESS, MAPPED, POSSIBLE

_IS_LOCAL = Path("channel.use") == "local"
_REFUSAL = "kernel.yama.ptrace_scope is 3, which forbids it to all"


def _channel(mechanism: str, fact: str, value: str) -> dict[str, object]:
    return {"channel.use": "local", "channel.mechanism": mechanism, fact: value}


RULES: tuple[Rule, ...] = (
    Rule(
        id="LOC001",
        severity=Severity.ERROR,
        when=_IS_LOCAL & (Path("channel.mechanism") == "cross-process"),
        require=Path(CROSS_PROCESS) == POSSIBLE,
        message=f"mechanism: cross-process is asked for, and cannot be used here: {{{CROSS_PROCESS}}}",
        fix="set  mechanism: auto,  which maps memory files, or let processes of one user read each other",
        source="design",
        examples=(
            Example(facts=_channel("cross-process", CROSS_PROCESS, POSSIBLE), passes=True),
            Example(facts=_channel("cross-process", CROSS_PROCESS, _REFUSAL), passes=False),
        ),
    ),
    Rule(
        id="LOC002",
        severity=Severity.NOTE,
        when=_IS_LOCAL & (Path("channel.mechanism") == "auto") & Known(CROSS_PROCESS),
        require=Path(CROSS_PROCESS) == POSSIBLE,
        message="memory without a memory file cannot be reached by peers, because processes cannot read "
        f"each other here: {{{CROSS_PROCESS}}}",
        fix="nothing to do for tiers in host memory, which have memory files; for other memory use the "
        "channel tcp",
        source="design",
        examples=(
            Example(facts=_channel("auto", CROSS_PROCESS, POSSIBLE), passes=True),
            Example(facts=_channel("auto", CROSS_PROCESS, _REFUSAL), passes=False),
        ),
    ),
    Rule(
        id="LOC003",
        severity=Severity.ERROR,
        when=_IS_LOCAL,
        require=Path(MAPPED) == POSSIBLE,
        message=f"the channel needs memory files, and there are none here: {{{MAPPED}}}",
        fix="use the channel tcp, or let the sandbox give memfd_create to us",
        source="design",
        examples=(
            Example(facts=_channel("auto", MAPPED, POSSIBLE), passes=True),
            Example(facts=_channel("auto", MAPPED, "the system gives no memory files"), passes=False),
        ),
    ),
)
