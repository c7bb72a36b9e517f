"""``kvferry size``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from kvferry.api import KVFerryError, KVGeometry
from kvferry.api.units import ByteSize, parse_size
from kvferry.cli.host import Host
from kvferry.cli.layout import wrapped
from kvferry.cli.output import add_format, print_json
from kvferry.cli.size_output import Request, SizeReport, report_json, report_text
from kvferry.cli.sources import environment_of, sources_of
from kvferry.compat import ExitCode
from kvferry.config import Config, Tier
from kvferry.plugins import LoadedPlugins, load_plugins
from kvferry.runtime.examination import fault_text
from kvferry.runtime.model_shape import AUTO, CONFIG_FILE, DTYPE_BYTES, read_model
from kvferry.runtime.no_size import brief, no_size
from kvferry.runtime.sizes import (
    HostBudget,
    RankSizes,
    SlotSizes,
    TierSize,
    host_budget,
    need,
    prompt_size,
    rank_sizes,
    slot_sizes,
    tier_fit,
)
from kvferry.runtime.startup import Reading, read

BLOCK_TOKENS = 128
_LARGEST_COUNT = 10**12
_EPILOG = """\
  kvferry size --model MODEL --tp 8
  kvferry size --model MODEL --tp 8 --config kvferry.yaml --tokens 32768 --requests 100
  kvferry size --model MODEL --tp 8 --cpu 16GiB --ssd 200GiB --memory 512GiB

Capacities are per rank, as in a configuration. No engine, no plugin of an engine and no model weights are
needed. With a model on several hosts, --workers says how many ranks run on each.
"""


@frozen(kw_only=True)
class _Tiers:
    """What holds chunks, how long they are, and what is known of the machine through plugins."""

    tiers: tuple[TierSize, ...]
    chunk_tokens: int
    plugins: LoadedPlugins
    faults: tuple[KVFerryError, ...] = ()
    """Of plugins. What is not theirs is right all the same."""


class SizeCommand:
    """Says what a model's KV cache takes, and what fits where."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = _EPILOG
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.add_argument(
            "--model",
            type=Path,
            required=True,
            metavar="FILE",
            help=f"the model's {CONFIG_FILE}, or the folder that holds it",
        )
        parser.add_argument("--tp", metavar="N", default="1", help="tensor-parallel ranks (default: 1)")
        parser.add_argument(
            "--dtype",
            default=AUTO,
            help=f"of the KV cache: {AUTO} (the model's own), {', '.join(DTYPE_BYTES)} (default: {AUTO})",
        )
        parser.add_argument(
            "--block-tokens",
            metavar="B",
            default=str(BLOCK_TOKENS),
            help=f"the engine's block size (default: {BLOCK_TOKENS})",
        )
        parser.add_argument(
            "--chunk-tokens", metavar="C", help="tokens that one key covers (default: the configuration's)"
        )
        parser.add_argument("--tokens", metavar="T", help="tokens of one prompt with its answer")
        parser.add_argument(
            "--requests", metavar="R", help="with --tokens: so many prompts that share nothing"
        )
        parser.add_argument(
            "--config",
            type=Path,
            metavar="FILE",
            help="configuration whose tiers are filled (default: the one in KVFERRY_CONFIG, if any)",
        )
        parser.add_argument("--cpu", metavar="SIZE", help="instead: a tier in memory of so much per rank")
        parser.add_argument("--ssd", metavar="SIZE", help="instead: a tier on SSD of so much per rank")
        parser.add_argument("--workers", metavar="N", help="ranks on one host (default: as many as --tp)")
        parser.add_argument("--memory", metavar="SIZE", help="of one host (default: what this machine has)")
        add_format(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """0, or 2 with faults of the configuration, or 4 with a plugin that cannot be used. Raises
        :class:`kvferry.api.KVFerryError` for anything that has no size."""
        ranks = _count(arguments.tp, "--tp")
        block_tokens = _count(arguments.block_tokens, "--block-tokens")
        workers = ranks if arguments.workers is None else _count(arguments.workers, "--workers")
        model = read_model(arguments.model, arguments.dtype)
        if arguments.cpu is not None or arguments.ssd is not None:
            held = self._named_tiers(arguments)
        else:
            reading = read(sources_of(arguments.config, self._host), distributions=self._host.distributions)
            if reading.config is None or reading.config_faults:
                return self._refuse(reading)
            held = _configured_tiers(reading.config, reading)
        chunk_tokens = held.chunk_tokens
        if arguments.chunk_tokens is not None:
            chunk_tokens = _count(arguments.chunk_tokens, "--chunk-tokens")
        geometry = KVGeometry(groups=model.groups, chunk_tokens=chunk_tokens)
        sizes = rank_sizes(geometry, model.attention_heads, ranks, block_tokens)
        slots = slot_sizes(held.tiers, sizes)
        request = _request(arguments, held.tiers, sizes, slots)
        report = SizeReport(
            file=arguments.model,
            model=model,
            sizes=sizes,
            fits=tuple(
                tier_fit(tier, sizes, slots, None if request is None else request.prompt)
                for tier in held.tiers
            ),
            request=request,
            host=self._budget(arguments, held, workers),
        )
        if arguments.format == "json":
            print_json(report_json(report))
        else:
            print(report_text(report, self._host.columns))
        self._tell("error[plugin]", held.faults)
        return int(ExitCode.BROKEN_PLUGIN if held.faults else ExitCode.CLEAN)

    def _named_tiers(self, arguments: argparse.Namespace) -> _Tiers:
        if arguments.config is not None:
            raise _usage(
                "--config and --cpu or --ssd exclude each other",
                "both say which tiers there are",
                "leave out one of them",
            )
        tiers = []
        if arguments.cpu is not None:
            tiers.append(TierSize(name="cpu", capacity=_size(arguments.cpu, "--cpu"), addressable=True))
        if arguments.ssd is not None:
            tiers.append(
                TierSize(
                    name="ssd",
                    capacity=_size(arguments.ssd, "--ssd"),
                    addressable=False,
                    in_flight=Tier(use="", capacity=ByteSize(1)).in_flight,
                )
            )
        return _Tiers(
            tiers=tuple(tiers),
            chunk_tokens=Config().chunk_tokens,
            plugins=load_plugins([], distributions=self._host.distributions),
        )

    def _budget(self, arguments: argparse.Namespace, held: _Tiers, workers: int) -> HostBudget | None:
        if not any(tier.addressable for tier in held.tiers):
            return None
        if arguments.memory is not None:
            return host_budget(held.tiers, workers, _size(arguments.memory, "--memory"), "--memory")
        fact = held.plugins.facts(environment_of(self._host)).facts.get("host.memory_bytes")
        if fact is None:
            return host_budget(held.tiers, workers, None)
        return host_budget(held.tiers, workers, fact.value, f"this machine: {fact.origin}")

    def _refuse(self, reading: Reading) -> int:
        self._tell("error[config]", reading.config_faults)
        self._tell("error[plugin]", reading.plugin_faults)
        return int(ExitCode.BROKEN_PLUGIN if reading.plugin_faults else ExitCode.ERRORS)

    def _tell(self, label: str, faults: Sequence[KVFerryError]) -> None:
        for fault in faults:
            print(wrapped(fault_text(label, fault), self._host.columns), file=sys.stderr)


def _configured_tiers(config: Config, reading: Reading) -> _Tiers:
    tiers = tuple(
        TierSize(
            name=name,
            capacity=tier.capacity,
            addressable=reading.plugins.backend(tier.use).capabilities.addressable,
            in_flight=tier.in_flight if number else None,
        )
        for number, (name, tier) in enumerate(config.tiers.items())
    )
    return _Tiers(
        tiers=tiers,
        chunk_tokens=config.chunk_tokens,
        plugins=reading.plugins,
        faults=reading.plugin_faults,
    )


def _request(
    arguments: argparse.Namespace, tiers: Sequence[TierSize], sizes: RankSizes, slots: SlotSizes
) -> Request | None:
    count = None if arguments.requests is None else _count(arguments.requests, "--requests")
    if arguments.tokens is None:
        if count is not None:
            raise _usage(
                "--requests is given without --tokens",
                "what requests need depends on how long they are",
                "say how many tokens a prompt and its answer have, such as --tokens 32768",
            )
        return None
    prompt = prompt_size(_count(arguments.tokens, "--tokens"), sizes)
    needs = () if count is None else tuple(need(tier, slots, prompt, count) for tier in tiers)
    return Request(prompt=prompt, count=count, needs=needs)


def _count(text: str, option: str) -> int:
    # Digits are bounded before they are read, so that no text costs more than a glance.
    if not (text.isascii() and text.isdigit() and len(text) <= 13 and 0 < int(text) <= _LARGEST_COUNT):
        raise no_size(
            f"{brief(text)} is not a whole number above zero",
            option,
            f"it must lie between 1 and {_LARGEST_COUNT}",
            f"write digits alone, such as {option} 8",
        )
    return int(text)


def _size(text: str, option: str) -> ByteSize:
    try:
        found = parse_size(text)
    except ValueError as error:
        raise no_size(
            f"{brief(text)} is not a size", option, str(error), f"such as {option} 16GiB"
        ) from error
    if not found:
        raise no_size(
            f"{brief(text)} is nothing", option, "a size above zero is needed", f"such as {option} 16GiB"
        )
    return found


def _usage(what: str, why: str, remedy: str) -> KVFerryError:
    return no_size(what, "command line", why, remedy)
