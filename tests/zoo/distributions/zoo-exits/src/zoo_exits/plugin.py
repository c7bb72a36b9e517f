"""Ends the process when it is imported."""

from __future__ import annotations

raise SystemExit(3)
