"""The P2P demo's table and its verdict."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from tests.demo.report import milliseconds, prompt_table, yes_or_no
from tests.demo_p2p.modes import Way
from tests.demo_p2p.passes import Borrowed, Shared

FAULTS = (
    "failed_loads",
    "failed_saves",
    "mismatched_blocks",
    "borrow_failed",
    "borrow_untrue",
    "borrow_late",
)
MIB = 1 << 20


def show_prompts(console: Console, ways: Mapping[Way, Shared]) -> None:
    """One row per prompt, with the tokens that came from the peer each way."""
    table = prompt_table(
        "Tokens that the second instance took out of the first one's memory",
        "of each way all runs; the rest of a prompt, a token at least, is computed",
        ("tokens", *("\n".join([way.channel, *way.mode.name.split(", ")]) for way in ways)),
    )
    for rows in zip(*(shared.rows for shared in ways.values()), strict=True):
        prompt = rows[0].prompt
        table.add_row(
            prompt.note,
            str(len(prompt.tokens)),
            *(_hits(row) for row in rows),
            yes_or_no(all(row.same for row in rows)),
        )
    console.print(table)


def _hits(row: Borrowed) -> str:
    return "/".join(str(borrowed) for borrowed in sorted({borrowed for _, borrowed in row.hits}))


def show_ways(console: Console, ways: Mapping[Way, Shared]) -> None:
    """One row per way."""
    longest = max(len(row.prompt.tokens) for shared in ways.values() for row in shared.rows)
    table = Table(
        title="What it takes, and what it saves",
        caption=f"ms to the first token of the prompt of {longest:,} tokens: computed,\n"
        "out of the peer's memory, out of the own first tier, and\n"
        "with the same tokens out of vLLM's own prefix cache (limit)\n"
        "sooner: out of the peer's memory than computed, median of all prompts",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("channel", no_wrap=True)
    table.add_column("pull", no_wrap=True)
    for heading in ("read\nMiB", "MiB/s", "com-\nputed", "from\npeer", "own\ntier", "limit", "sooner"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("same\nanswers", justify="center", no_wrap=True)
    for way, shared in ways.items():
        row = max(shared.rows, key=lambda each: len(each.prompt.tokens))
        same = sum(each.same for each in shared.rows)
        table.add_row(
            way.channel,
            way.mode.name,
            f"{shared.read_bytes / MIB:,.0f}",
            f"{shared.read_bytes / MIB / shared.read_seconds:,.0f}" if shared.read_seconds else "-",
            milliseconds(row.cold_seconds),
            milliseconds(row.peer_seconds),
            milliseconds(row.own_seconds),
            milliseconds(row.limit_seconds),
            f"{_sooner(shared):.1f}x",
            f"[{'green' if same == len(shared.rows) else 'bold red'}]{same} of {len(shared.rows)}[/]",
        )
    console.print(table)


def show_summary(console: Console, ways: Mapping[Way, Shared]) -> None:
    """Ratios, and what was lent."""
    fastest = max(_sooner(shared) for shared in ways.values())
    granted = sum(shared.holder["lend_granted"] for shared in _last_of_each_holder(ways))
    open_now = sum(shared.holder["lend_leases"] for shared in ways.values())
    console.print(
        f"First token out of a peer's memory up to [bold]{fastest:.1f} times sooner[/] than computed.\n"
        f"The lending instances granted {granted:,.0f} reads; {open_now:.0f} of these grants are still open.",
        highlight=False,
    )


def _last_of_each_holder(ways: Mapping[Way, Shared]) -> list[Shared]:
    """A holder's counters go on from one mode to the next: the last of them."""
    return list({(way.channel, way.mode.holder): shared for way, shared in ways.items()}.values())


def _sooner(shared: Shared) -> float:
    return statistics.median(row.cold_seconds / row.peer_seconds for row in shared.rows)


def failures(ways: Mapping[Way, Shared]) -> list[str]:
    """Everything that must not be, one sentence each."""
    found = []
    for way, shared in ways.items():
        for row in shared.rows:
            whole = row.prompt.whole_blocks
            if not row.same:
                found.append(f"{way}: the answer to '{row.prompt.note}' differs")
            if row.hits != {(whole, whole)}:
                found.append(
                    f"{way}: '{row.prompt.note}' took {_hits(row)} tokens out of the peer's memory, and not "
                    f"{whole}, or others as well"
                )
        if not shared.read_bytes:
            found.append(f"{way}: no bytes were read from the peer")
        for who, counters in (("borrowing", shared.borrower), ("lending", shared.holder)):
            found += [f"{way}, {who}: {counters[each]:.0f} {each}" for each in FAULTS if counters[each]]
        if shared.holder["lend_leases"] or shared.holder["lend_slots"]:
            found.append(f"{way}: what was lent has not come back")
        if way.mode.holder and not shared.holder["lend_staged"]:
            found.append(f"{way}: nothing was staged")
    return found
