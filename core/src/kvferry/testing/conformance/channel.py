"""The suite for channels."""

from __future__ import annotations

from kvferry.testing.conformance.channel_bounds import BoundsLaws
from kvferry.testing.conformance.channel_bytes import BytesLaws
from kvferry.testing.conformance.channel_death import DeathLaws
from kvferry.testing.conformance.channel_model import ModelLaws
from kvferry.testing.conformance.channel_peers import PeerLaws
from kvferry.testing.conformance.channel_registration import RegistrationLaws
from kvferry.testing.conformance.channel_tickets import TicketLaws


# pytest begins with the last base: laws that say in one call what is wrong come before those that need many.
class ChannelConformance(
    ModelLaws, DeathLaws, PeerLaws, TicketLaws, RegistrationLaws, BoundsLaws, BytesLaws, kit=True
):
    """For a channel with the shape of :class:`kvferry.api.Channel`.

    An author gives ``plugin`` and ``channel``, a fixture ``options`` where the defaults will not do, and
    ``subject``, so that peers can be made in processes of their own, which are killed and stopped::

        class TestAcme(ChannelConformance):
            plugin = "acme"
            channel = "acme"
            subject = "tests.acme_subject:make"

    with, in ``tests/acme_subject.py``::

        def make():
            return AcmeChannel(AcmeOptions())

    ``patience`` and ``grace`` (seconds) may be changed.
    """
