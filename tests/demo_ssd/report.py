"""The SSD demo's table, its summary and its verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console

from tests.demo.passes import Pass, Served, ServedSmall
from tests.demo.prompts import BLOCK_TOKENS
from tests.demo.report import milliseconds, prompt_table, yes_or_no
from tests.demo_ssd.passes import AfterKill, Restarted, Risen

COUNTED = 1000
"""Prompts of fewer tokens are nearly computed again: their ratios say nothing about the cache."""
FAULTS = (
    "mismatched_blocks",
    "failed_loads",
    "failed_saves",
    "lower_corrupt",
    "lower_failures",
    "lower_failed_stores",
    "lower_failed_fetches",
)


def show_table(
    console: Console, filled: Sequence[Served], restarted: Sequence[Risen], after: Sequence[ServedSmall]
) -> None:
    """One row per prompt."""
    table = prompt_table(
        "Time to first token, cold and with a KV cache from an SSD",
        "SSD: stored by an engine that was stopped, served by the next\n"
        "CPU: the same hit from the CPU tier\n"
        "limit: vLLM's own prefix cache supplies exactly the same tokens\n"
        "killed: hit tokens after kill -9 and one more start",
        ("tokens", "hit\nSSD", "cold\nms", "SSD\nms", "CPU\nms", "limit\nms", "killed"),
    )
    for stored, risen, last in zip(filled, restarted, after, strict=True):
        table.add_row(
            stored.prompt.note,
            str(len(stored.prompt.tokens)),
            str(risen.cached_tokens),
            milliseconds(stored.cold_seconds),
            milliseconds(risen.ssd_seconds),
            milliseconds(risen.cpu_seconds),
            milliseconds(risen.limit_seconds),
            str(last.cached_tokens),
            yes_or_no(stored.same and risen.same and last.same),
        )
    console.print(table)


def show_summary(
    console: Console,
    filled: Pass,
    restarted: Restarted,
    killed: AfterKill,
    *,
    memory_mib: int,
    direct: bool,
) -> None:
    """Ratios, and what was compared. ``direct``: the SSD's files are read past the page cache."""
    rows = [
        (stored, risen)
        for stored, risen in zip(filled.rows, restarted.rows, strict=True)
        if len(stored.prompt.tokens) >= COUNTED
    ]
    sooner = statistics.median(stored.cold_seconds / risen.ssd_seconds for stored, risen in rows)
    above = statistics.median(risen.ssd_seconds / risen.cpu_seconds for _, risen in rows)
    times = {
        name: milliseconds(statistics.median(seconds))
        for name, seconds in (
            ("cold", [stored.cold_seconds for stored, _ in rows]),
            ("SSD", [risen.ssd_seconds for _, risen in rows]),
            ("CPU", [risen.cpu_seconds for _, risen in rows]),
        )
    }
    hit = sum(row.cached_tokens for row in killed.interrupted)
    whole = sum(row.prompt.whole_blocks for row in killed.interrupted)
    right = sum(row.same for row in (*killed.rows, *killed.interrupted))
    console.print(
        f"Stored {int(filled.counters['saved_bytes']) >> 20} MiB through a CPU tier of {memory_mib} MiB; "
        f"the next engine found {restarted.adopted} chunks in the folder.\n"
        f"First token from the SSD: [bold]{sooner:.1f} times sooner[/] than cold, "
        f"[bold]{above:.2f} times[/] the time from the CPU tier (medians, prompts of {COUNTED:,} tokens and "
        f"more: cold {times['cold']}, SSD {times['SSD']}, CPU {times['CPU']} ms). {_page_cache(direct)}\n"
        f"kill -9 during stores: {killed.durable} of the {killed.chunks} chunks under way were whole on "
        f"the disk, {hit:,} of {whole:,} tokens came from there, the rest was computed again. "
        f"{right} of {len(killed.rows) + len(killed.interrupted)} answers after it are the same.\n"
        f"Restored then and compared by digest: {killed.counters['verified_blocks']:.0f} blocks of "
        f"{BLOCK_TOKENS} tokens, {killed.counters['mismatched_blocks']:.0f} differ; "
        f"{killed.counters['lower_corrupt']:.0f} chunks were damaged.",
        highlight=False,
    )


def _page_cache(direct: bool) -> str:
    if direct:
        return "The SSD is read past the system's page cache (direct I/O), so that plays no part."
    return "This file system has no direct I/O, so the system's page cache may have helped."


def failures(filled: Pass, restarted: Restarted, killed: AfterKill, memory_mib: int) -> list[str]:
    """Everything that must not be, one sentence each."""
    found = []
    if filled.counters["saved_bytes"] <= memory_mib << 20:
        found.append("all prompts fitted into the CPU tier, so this showed nothing about the SSD")
    for name, rows in (
        ("first", filled.rows),
        ("restarted", restarted.rows),
        ("last", (*killed.rows, *killed.interrupted)),
    ):
        found += [
            f"{name} engine: the answer to '{row.prompt.note}' ({len(row.prompt.tokens)} tokens) differs"
            for row in rows
            if not row.same
        ]
    for risen in restarted.rows:
        if risen.cached_tokens != risen.prompt.whole_blocks or not risen.whole_from_ssd:
            found.append(
                f"'{risen.prompt.note}': {risen.cached_tokens} tokens were restored after the restart, "
                f"{risen.prompt.whole_blocks} were stored; or not all of them came from the SSD"
            )
    for last in killed.rows:
        if last.cached_tokens != last.prompt.whole_blocks:
            found.append(f"'{last.prompt.note}': only {last.cached_tokens} tokens outlived the kill")
    if killed.durable >= killed.chunks:
        found.append("everything had been stored before the kill, so it showed nothing")
    if killed.durable < 0:
        found.append("chunks that were in the folder before the kill are not there any more")
    for name, counters in (
        ("first", filled.counters),
        ("restarted", restarted.counters),
        ("last", killed.counters),
    ):
        found += [f"{name} engine: {counters[each]:.0f} {each}" for each in FAULTS if counters[each]]
        if counters["lower_open"] != 1:
            found.append(f"{name} engine: the SSD tier is not in use")
    if not killed.counters["verified_blocks"]:
        found.append("no block's digest was compared")
    return found
