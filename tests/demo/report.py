"""The demo's table, its summary and its verdict."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from tests.demo.passes import Pass, Served, ServedSmall
from tests.demo.prompts import BLOCK_TOKENS


def prompt_table(title: str, caption: str, numbers: Sequence[str]) -> Table:
    """A table with a row per prompt: its note, ``numbers``, and whether the answer was the same."""
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("prompt", no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("same\nanswer", justify="center", no_wrap=True)
    return table


def yes_or_no(same: bool) -> str:
    """The last cell of a row."""
    return "[green]yes[/]" if same else "[bold red]NO[/]"


def show_table(
    console: Console, timed: Sequence[Served], verified: Sequence[Served], small: Sequence[ServedSmall]
) -> None:
    """One row per prompt."""
    table = prompt_table(
        "Time to first token, cold and with a restored KV cache",
        "limit: vLLM's own prefix cache supplies exactly the same tokens\n"
        "small: hit tokens when the tier holds a third of the bytes",
        ("tokens", "hit,\nours", "hit,\nvLLM", "cold\nms", "kvferry\nms", "limit\nms", "small"),
    )
    for row, checked, lost in zip(timed, verified, small, strict=True):
        table.add_row(
            row.prompt.note,
            str(len(row.prompt.tokens)),
            str(row.hit_tokens),
            str(row.cached_tokens),
            milliseconds(row.cold_seconds),
            milliseconds(row.kvferry_seconds),
            milliseconds(row.limit_seconds),
            str(lost.cached_tokens),
            yes_or_no(row.same and checked.same and lost.same),
        )
    console.print(table)


def show_summary(
    console: Console,
    timed: Sequence[Served],
    verified: Pass,
    small: Sequence[ServedSmall],
    small_counters: dict[str, float],
) -> None:
    """Ratios, and what was compared."""
    # Of prompts that are nearly computed again the ratio says nothing about the cache.
    long = [row for row in timed if len(row.prompt.tokens) >= 1000]
    faster = statistics.median(row.cold_seconds / row.kvferry_seconds for row in long)
    above = statistics.median(row.kvferry_seconds / row.limit_seconds for row in long)
    blocks = verified.counters["verified_blocks"] + small_counters["verified_blocks"]
    bad = verified.counters["mismatched_blocks"] + small_counters["mismatched_blocks"]
    hit = sum(row.cached_tokens for row in small)
    whole = sum(row.prompt.whole_blocks for row in small)
    console.print(
        f"First token [bold]{faster:.1f} times sooner[/] than cold, "
        f"[bold]{above:.2f} times[/] the time with vLLM's own prefix cache (medians, prompts of 1,000 "
        "tokens and more).\n"
        f"Restored and compared by digest with what was stored: {blocks:.0f} blocks of {BLOCK_TOKENS} "
        f"tokens, {bad:.0f} differ.\n"
        f"Small tier: {hit:,} of {whole:,} tokens were still there, "
        f"{small_counters['evictions']:.0f} chunks had made room for others.",
        highlight=False,
    )


def failures(
    timed: Sequence[Served],
    verified: Pass,
    small: Sequence[ServedSmall],
    small_counters: dict[str, float],
) -> list[str]:
    """Everything that must not be, one sentence each."""
    found = []
    passes: tuple[tuple[str, Iterable[Served | ServedSmall]], ...] = (
        ("timed", timed),
        ("verified", verified.rows),
        ("small tier", small),
    )
    for name, rows in passes:
        found += [
            f"{name} pass: the answer to '{row.prompt.note}' ({len(row.prompt.tokens)} tokens) differs"
            for row in rows
            if not row.same
        ]
    for row in (*timed, *verified.rows):
        if row.cached_tokens != row.prompt.whole_blocks:
            found.append(
                f"'{row.prompt.note}': {row.cached_tokens} tokens were restored, "
                f"{row.prompt.whole_blocks} were stored"
            )
    for counters in (verified.counters, small_counters):
        if counters["mismatched_blocks"] or not counters["verified_blocks"]:
            found.append("restored blocks differ from those that were stored, or none was compared")
        if counters["failed_loads"] or counters["failed_saves"]:
            found.append("a copy failed")
    small_hits = sum(row.cached_tokens for row in small)
    if small_hits == 0:
        found.append("the small tier gave no hit at all")
    if small_hits == sum(row.prompt.whole_blocks for row in small):
        found.append("the small tier lost nothing, so this pass showed nothing")
    if len({row.cold.tokens for row in timed}) < len(timed):
        found.append("two prompts have the same answer, so comparing answers shows nothing")
    return found


def milliseconds(seconds: float) -> str:
    """For the table."""
    return f"{seconds * 1000:,.0f}"
