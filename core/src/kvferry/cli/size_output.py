"""What a model's KV cache takes and what fits where, as text and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import frozen

from kvferry.api import GroupGeometry
from kvferry.cli.layout import labelled
from kvferry.cli.output import table
from kvferry.compat.host_rules import COMFORTABLE
from kvferry.compat.values import size_text
from kvferry.runtime.layer_kinds import FULL, MLA
from kvferry.runtime.model_shape import ModelShape
from kvferry.runtime.sizes import HostBudget, Need, PromptSize, RankGroup, RankSizes, TierFit

SCHEMA_VERSION = 1
_KINDS = {FULL: "full attention", MLA: "latent attention (MLA)"}


@frozen(kw_only=True)
class Request:
    """What was asked about prompts. ``needs`` has one entry per tier."""

    prompt: PromptSize
    count: int | None
    needs: tuple[Need, ...]


@frozen(kw_only=True)
class SizeReport:
    """Everything that one run of ``kvferry size`` found."""

    file: Path
    model: ModelShape
    sizes: RankSizes
    fits: tuple[TierFit, ...]
    request: Request | None
    host: HostBudget | None
    """None without a tier in memory."""


def report_text(report: SizeReport, columns: int | None) -> str:
    """The report for people: sizes rounded to one decimal."""
    lines = [*_model_lines(report, columns), "", *_unit_lines(report.sizes)]
    if report.fits:
        lines += ["", *_tier_lines(report, columns)]
    if report.request is not None:
        lines += ["", *_request_lines(report.request, report.sizes, columns)]
    if report.host is not None:
        lines += ["", *_host_lines(report.host, columns)]
    return "\n".join(lines)


def report_json(report: SizeReport) -> dict[str, Any]:
    """The report for programs: all sizes in bytes, and exact."""
    sizes, request = report.sizes, report.request
    return {
        "schema": SCHEMA_VERSION,
        "model": {
            "file": str(report.file),
            "type": report.model.name,
            "dtype": report.model.dtype,
            "attention_heads": report.model.attention_heads,
            "groups": [_group_json(group) for group in sizes.groups],
            "notes": list(report.model.notes),
        },
        "ranks": sizes.ranks,
        "block_tokens": sizes.block_tokens,
        "chunk_tokens": sizes.chunk_tokens,
        "token_bytes": _both(sizes.token_bytes, sizes),
        "block_bytes": _both(sizes.block_bytes, sizes),
        "chunk_bytes": _both(sizes.chunk_bytes, sizes),
        "tiers": [_tier_json(fit, sizes) for fit in report.fits],
        "prompt": None if request is None else _prompt_json(request.prompt, sizes),
        "requests": None
        if request is None or request.count is None
        else {
            "count": request.count,
            "bytes": _both(request.count * request.prompt.chunks * sizes.chunk_bytes, sizes),
            "tiers": [
                {"name": each.tier.name, "bytes": _both(each.rank_bytes, sizes), "fits": each.fits}
                for each in request.needs
            ],
        },
        "host": None if report.host is None else _host_json(report.host),
    }


def _model_lines(report: SizeReport, columns: int | None) -> list[str]:
    model, sizes = report.model, report.sizes
    name = f"{model.name}, " if model.name else ""
    lines = labelled("model  ", f"{name}KV cache of {model.dtype} ({report.file})", columns)
    for group in model.groups:
        lines += labelled("       ", _layers_text(group), columns)
    share = _share_text(sizes.groups[0]) if sizes.ranks > 1 else ""
    lines += labelled("ranks  ", f"{sizes.ranks}{share}", columns)
    for note in model.notes:
        lines += labelled("note   ", note, columns)
    return lines


def _layers_text(group: GroupGeometry) -> str:
    kind = _KINDS.get(group.kind, f"a window of {group.window} tokens, kept in full")
    layers = f"{group.layers} layer{'s' if group.layers != 1 else ''} with {kind}: "
    if group.kind == MLA:
        return f"{layers}one latent of {group.head_size} numbers"
    return f"{layers}{group.kv_heads} KV head{'s' if group.kv_heads != 1 else ''} of {group.head_size}"


def _share_text(group: RankGroup) -> str:
    """How the first group is shared; all groups of a model are shared alike."""
    if group.geometry.kind == MLA:
        return ", each with all of every latent"
    heads = f", each with {group.kv_heads} KV head{'s' if group.kv_heads != 1 else ''}"
    return heads + (f", and {group.copies} ranks with the same one" if group.copies > 1 else "")


def _unit_lines(sizes: RankSizes) -> list[str]:
    rows = [("", "TOKENS", "ON ONE RANK", "ON ALL RANKS")]
    for name, tokens, count in (
        ("token", 1, sizes.token_bytes),
        ("block", sizes.block_tokens, sizes.block_bytes),
        ("chunk", sizes.chunk_tokens, sizes.chunk_bytes),
    ):
        rows.append((name, str(tokens), size_text(count), size_text(count * sizes.ranks)))
    return table(rows)


def _tier_lines(report: SizeReport, columns: int | None) -> list[str]:
    ranks, request = report.sizes.ranks, report.request
    head = ["TIER", "ON ONE RANK", "ON ALL RANKS", "CHUNKS", "TOKENS"]
    if request is not None:
        head.append(f"PROMPTS OF {request.prompt.tokens}")
    rows = [head]
    for fit in report.fits:
        capacity = fit.tier.capacity
        row = [
            fit.tier.name,
            size_text(capacity),
            size_text(capacity * ranks),
            str(fit.chunks),
            str(fit.tokens),
        ]
        if request is not None:
            row.append("-" if fit.prompts is None else str(fit.prompts))
        rows.append(row)
    lines = table(rows)
    if len(report.fits) > 1:
        lines += labelled("", "A chunk may lie in several tiers at once, so these do not add up.", columns)
    return lines


def _request_lines(request: Request, sizes: RankSizes, columns: int | None) -> list[str]:
    prompt = request.prompt
    if not prompt.chunks:
        why = f"{prompt.tokens} tokens are less than a block of {sizes.block_tokens}: nothing of them is kept"
        return labelled("prompt    ", why, columns)
    chunks = f"{prompt.chunks} chunk{'s' if prompt.chunks != 1 else ''}"
    lines = labelled(
        "prompt    ",
        f"of {prompt.tokens} tokens: {prompt.kept_tokens} are kept, in {chunks}, "
        f"{_both_text(prompt.chunks * sizes.chunk_bytes, sizes)}",
        columns,
    )
    if request.count is None:
        return lines
    every = request.count * prompt.chunks * sizes.chunk_bytes
    texts = [f"{request.count} of them take {_both_text(every, sizes)}"] if not request.needs else []
    for each in request.needs:
        fits = "they fit" if each.fits else "they do not fit"
        texts.append(
            f"{request.count} of them take {_both_text(each.rank_bytes, sizes)} in {each.tier.name}: {fits}"
        )
    for index, text in enumerate(texts):
        lines += labelled("          " if index else "requests  ", text, columns)
    return lines


def _host_lines(host: HostBudget, columns: int | None) -> list[str]:
    each, total = size_text(host.worker_bytes), size_text(host.total_bytes)
    text = f"{host.workers} workers with {each} each take {total} of memory"
    if host.workers == 1:
        text = f"1 worker takes {total} of memory"
    if host.memory_bytes is None or host.share is None:
        text += "; how much this host has could not be found out"
    else:
        origin = f" ({host.memory_origin})" if host.memory_origin else ""
        text += f", {_percent(host.share)} of {size_text(host.memory_bytes)}{origin}: {_verdict(host.share)}"
    lines = labelled("host   ", text, columns)
    if host.in_flight_bytes:
        held = size_text(host.in_flight_bytes)
        lines += labelled(
            "       ", f"of each worker's, copies to and from lower tiers hold up to {held}", columns
        )
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share < 10 else f"{share:.0f} times"


def _verdict(share: float) -> str:
    if share > 1:
        return "more than it has"
    return "fine" if share <= COMFORTABLE else "that leaves little to the engine and the model"


def _both(count: int, sizes: RankSizes) -> dict[str, int]:
    return {"rank": count, "all": count * sizes.ranks}


def _both_text(count: int, sizes: RankSizes) -> str:
    if sizes.ranks == 1:
        return size_text(count)
    return f"{size_text(count)} a rank ({size_text(count * sizes.ranks)} in all)"


def _group_json(group: RankGroup) -> dict[str, Any]:
    geometry = group.geometry
    return {
        "kind": geometry.kind,
        "layers": geometry.layers,
        "kv_heads": geometry.kv_heads,
        "head_size": geometry.head_size,
        "window": geometry.window,
        "rank_kv_heads": group.kv_heads,
        "copies": group.copies,
        "token_bytes": group.token_bytes,
    }


def _tier_json(fit: TierFit, sizes: RankSizes) -> dict[str, Any]:
    return {
        "name": fit.tier.name,
        "addressable": fit.tier.addressable,
        "capacity_bytes": _both(fit.tier.capacity, sizes),
        "slot_bytes": fit.slot_bytes,
        "chunks": fit.chunks,
        "tokens": fit.tokens,
        "prompts": fit.prompts,
    }


def _prompt_json(prompt: PromptSize, sizes: RankSizes) -> dict[str, Any]:
    return {
        "tokens": prompt.tokens,
        "kept_tokens": prompt.kept_tokens,
        "chunks": prompt.chunks,
        "bytes": _both(prompt.chunks * sizes.chunk_bytes, sizes),
    }


def _host_json(host: HostBudget) -> dict[str, Any]:
    return {
        "workers": host.workers,
        "worker_bytes": host.worker_bytes,
        "in_flight_bytes": host.in_flight_bytes,
        "total_bytes": host.total_bytes,
        "memory_bytes": host.memory_bytes,
        "memory_origin": host.memory_origin,
        "share": host.share,
    }
