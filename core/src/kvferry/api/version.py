"""The version of the plugin contract, separate from the versions of distributions."""

from __future__ import annotations

API_VERSION = "1.0"
"""``major.minor``. A minor step only adds: a hook, an argument, a method with a default, or a
capability that defaults to "not claimed". Anything else is a major step."""
