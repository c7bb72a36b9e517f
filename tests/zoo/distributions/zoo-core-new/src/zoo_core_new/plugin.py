"""Requires a later kvferry, which its metadata says: this must never run."""

from __future__ import annotations

raise SystemExit("imported although its metadata rules it out")
