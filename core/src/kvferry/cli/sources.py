"""Which configuration a command works on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from kvferry.api import HostEnvironment
from kvferry.cli.host import Host
from kvferry.config import ConfigSources, find_config

_PIPED = Path("-")


def add_config(parser: argparse.ArgumentParser) -> None:
    """The option ``--config FILE``."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="configuration whose plugins are loaded (default: the one in KVFERRY_CONFIG, if any)",
    )


def sources_of(file: Path | None, host: Host) -> ConfigSources:
    """``file``, or what ``KVFERRY_CONFIG`` names, with the environment above it.

    Raises :class:`kvferry.api.KVFerryError` when ``KVFERRY_CONFIG`` cannot be a file's name.
    """
    found = file if file is not None else find_config(host.environment, {})
    return ConfigSources(file=found, environment=host.environment, overrides={})


def sources_of_all(files: Sequence[Path], host: Host) -> list[ConfigSources]:
    """One for each file; ``-`` is what stands on standard input, however often it is named."""
    piped = host.read_input() if _PIPED in files else b""
    found = [sources_of(file, host) for file in files]
    return [
        evolve(each, file=Path("<stdin>"), content=piped) if file == _PIPED else each
        for file, each in zip(files, found, strict=True)
    ]


def environment_of(host: Host) -> HostEnvironment:
    """What probes may look at."""
    return HostEnvironment(variables=dict(host.environment), root=host.root)
