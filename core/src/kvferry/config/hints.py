"""Annotations of options classes, resolved once per use and without touching the class."""

from __future__ import annotations

import types
from typing import Any, Union, get_args, get_origin, get_type_hints


def type_hints(cls: type) -> dict[str, Any]:
    """Annotations by field name. Raises ``NameError`` or ``TypeError`` where one cannot be read."""
    return get_type_hints(cls)


def optional_of(hint: Any) -> Any:
    """``T`` if ``hint`` is ``T | None``, else None."""
    if get_origin(hint) not in (Union, types.UnionType):
        return None
    inner = get_args(hint)
    others = [item for item in inner if item is not type(None)]
    return others[0] if len(others) == 1 and len(inner) == 2 else None
