"""From the section ``lookup:`` to an instance's connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvferry_sharing_p2p.directory.publisher import Identity, KeySource, PublisherOptions
from kvferry_sharing_p2p.network.client import DirectoryClient
from kvferry_sharing_p2p.network.endpoint import parse_url
from kvferry_sharing_p2p.network.options import ControllerOptions
from kvferry_sharing_p2p.network.secret import find_secret


def controller_lookup(
    options: ControllerOptions,
    identity: Identity,
    source: KeySource,
    *,
    variables: Mapping[str, str],
    clock: Callable[[], float],
    random: Callable[[int], bytes],
) -> DirectoryClient:
    """A client that is not open yet. ``variables`` are the environment's; the rest is as
    :class:`DirectoryClient` has it. Raises :class:`kvferry.api.KVFerryError` of kind ``CONFIG`` when the
    secret cannot be had."""
    return DirectoryClient(
        parse_url(options.url),
        find_secret(options.secret_file, options.secret_variable, variables),
        identity,
        source,
        PublisherOptions(),
        clock=clock,
        random=random,
    )
