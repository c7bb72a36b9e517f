"""From the sections ``p2p:`` and ``lookup:`` to what carries an instance's messages."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry_sharing_p2p.network.endpoint import parse_url
from kvferry_sharing_p2p.network.options import ControllerOptions
from kvferry_sharing_p2p.network.secret import find_secret
from kvferry_sharing_p2p.peers.carrier import CarrierSettings, PeerNetworkCarrier
from kvferry_sharing_p2p.peers.options import P2POptions


def make_carrier(options: P2POptions, lookup: object, environment: Mapping[str, str]) -> PeerNetworkCarrier:
    """A carrier that is not open yet. Peers know the controller's secret, and use it among themselves, too.

    Raises :class:`kvferry.api.KVFerryError` of kind ``CONFIG`` without a controller, or when the secret
    cannot be had.
    """
    if not isinstance(lookup, ControllerOptions):
        raise KVFerryError(
            "peers cannot be found without a directory",
            kind=ErrorKind.CONFIG,
            where="lookup",
            why="p2p asks the directory who has what",
            remedy="set  lookup: {use: controller, url: tcp://host:9900}",
            retry=Retry.AFTER_CHANGE,
        )
    return PeerNetworkCarrier(
        CarrierSettings(
            listen=parse_url(options.listen),
            told=parse_url(options.advertise) if options.advertise else None,
            controller=parse_url(lookup.url),
            secret=find_secret(lookup.secret_file, lookup.secret_variable, environment),
        ),
        clock=time.monotonic,
        random=os.urandom,
    )
