"""Needs a library that is not installed."""

from __future__ import annotations

import zoo_tape_driver

from kvferry.api import Manifest

MANIFEST = Manifest(name="zoo_missing_dependency", api=">=1.0,<2", rule_prefix="ZOOMISSINGDEPENDENCY")
DRIVER = zoo_tape_driver.__name__
