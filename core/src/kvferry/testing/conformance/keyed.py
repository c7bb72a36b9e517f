"""The suite for backends that read and write by key."""

from __future__ import annotations

from kvferry.testing.conformance.keyed_bytes import BytesLaws
from kvferry.testing.conformance.keyed_crash import CrashLaws
from kvferry.testing.conformance.keyed_machine import ModelLaws
from kvferry.testing.conformance.keyed_store import StoreLaws
from kvferry.testing.conformance.keyed_tickets import TicketLaws


# pytest begins with the last base: laws that say in one call what is wrong come before those that need many.
class BackendConformance(ModelLaws, CrashLaws, StoreLaws, TicketLaws, BytesLaws, kit=True):
    """For a backend with the shape of :class:`kvferry.api.Backend`.

    An author gives ``plugin`` and ``backend``, a fixture ``options`` where the defaults will not do,
    and a fixture ``raw``, the side door to the store::

        class TestAcme(BackendConformance):
            plugin = "acme"
            backend = "acme"

            @pytest.fixture
            def options(self, tmp_path):
                return AcmeOptions(path=str(tmp_path))

            @pytest.fixture
            def raw(self, options):
                return AcmeRaw(options.path)

    ``capacity`` (bytes) and ``patience`` (seconds) may be changed.
    """
