"""Asks an existing module for what it does not have, as after an upgrade of a library."""

from __future__ import annotations

from kvferry.api import Manifest, TapeCatalogue

MANIFEST = Manifest(name="zoo_import_error", api=">=1.0,<2", rule_prefix="ZOOIMPORTERROR")
CATALOGUE = TapeCatalogue()
