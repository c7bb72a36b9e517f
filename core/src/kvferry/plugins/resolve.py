"""Import strings: ``package.module:attribute``. The last gate, passed only by what is built."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry.compat.guard import Raised, call_foreign
from kvferry.plugins.hints import closest
from kvferry.plugins.remedies import mend

_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
IMPORT_STRING = re.compile(f"(?P<module>{_NAME}):(?P<attribute>{_NAME})")
MODULE_NAME = re.compile(_NAME)


def is_absent(error: BaseException, module: str) -> bool:
    """True when ``module`` itself or a package above it does not exist, false when it exists and
    something inside it could not be imported."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return False
    return error.name == module or module.startswith(f"{error.name}.")


def import_failure(error: BaseException, module: str) -> tuple[str, str]:
    """``(reason, remedy)`` for an import of ``module`` that ended with ``error``."""
    if is_absent(error, module):
        return (
            f"there is no module {module!r}",
            "reinstall the distribution: its metadata and its files do not match",
        )
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return (
            f"importing {module!r} failed: it needs the module {error.name!r}, which is not installed",
            f"install what provides {error.name!r}",
        )
    return (
        f"importing {module!r} failed with {Raised(error)}",
        f"run  python -c 'import {module}'  for the whole traceback",
    )


def resolve(import_string: str, *, what: str, where: str = "") -> Any:
    """The object that ``import_string`` names; imports its module.

    ``what`` says whose factory or options it is, for example ``backend 'cpu' of plugin
    'backend_cpu'``. Raises :class:`KVFerryError` (kind ``PLUGIN``) when the string is malformed, the
    module is absent or fails, or the attribute does not exist. Cold path only.
    """
    match = IMPORT_STRING.fullmatch(import_string)
    if match is None:
        raise _error(
            f"{what} names {import_string!r}",
            where,
            "an import string reads package.module:attribute",
            "report it to the plugin's author",
        )
    module_name, attribute = match["module"], match["attribute"]
    imported = call_foreign(lambda: importlib.import_module(module_name))
    if isinstance(imported, Raised):
        reason, remedy = import_failure(imported.error, module_name)
        raise _error(f"{what} cannot be built", where, reason, remedy) from imported.error
    found = call_foreign(lambda: _attribute(imported.value, attribute))
    if isinstance(found, Raised):
        why = f"module {module_name!r} has no attribute {attribute!r}"
        if not isinstance(found.error, AttributeError):
            why = f"module {module_name!r} does not give its attribute {attribute!r}: {found}"
        close = closest(attribute, _public(imported.value))
        meant = f"write '{module_name}:{close}', if that is meant" if close else f"mend {import_string!r}"
        raise _error(f"{what} cannot be built", where, why, mend(meant)) from found.error
    return found.value


def _public(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]


def _attribute(module: ModuleType, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _error(what: str, where: str, why: str, remedy: str) -> KVFerryError:
    return KVFerryError(
        what,
        kind=ErrorKind.PLUGIN,
        where=where,
        why=why,
        remedy=remedy,
        retry=Retry.AFTER_CHANGE,
    )
