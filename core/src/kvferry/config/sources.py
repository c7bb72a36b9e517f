"""The three sources above the defaults, each read into a tree: file, environment, overrides."""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from kvferry.config.merging import branch, combined
from kvferry.config.nodes import (
    OVERRIDES,
    VARIABLE_PREFIX,
    Broken,
    ConfigPath,
    Fault,
    Node,
    Place,
    Source,
    brief,
    fault,
)
from kvferry.config.yaml_text import (
    EMPTY_REMEDY,
    MAX_BYTES,
    MAX_DEPTH,
    read_document,
    read_value,
    scalar_problem,
)

FILE_VARIABLE = "KVFERRY_CONFIG"
_PREFIX = "kvferry"
_FILE_KEY = "config"
_OVERRIDE = Place(Source.OVERRIDE, OVERRIDES)


@frozen(kw_only=True)
class ConfigSources:
    """Where a configuration is read from. Nothing is read beyond what is handed in here.

    ``file`` is None when there is none; a file that is named must exist. ``environment`` is a whole
    environment, of which only names that begin with ``KVFERRY__`` count. ``overrides`` is the
    engine's ``kv_connector_extra_config``, of which only ``kvferry`` and ``kvferry.*`` count.
    """

    file: Path | None
    environment: Mapping[str, str]
    overrides: Mapping[str, Any]
    content: bytes | None = None
    """What stands in ``file``, where that is no file on disk: then its name is only shown."""


def find_config(environment: Mapping[str, str], overrides: Mapping[str, Any]) -> Path | None:
    """The file to read: the override ``kvferry.config``, else ``KVFERRY_CONFIG``, else None.

    Raises :class:`kvferry.api.KVFerryError` when a name is given that cannot be one. Whether the
    file exists is found out by reading it.
    """
    named: list[tuple[object, Place, ConfigPath]] = []
    nested = overrides.get(_PREFIX)
    if f"{_PREFIX}.{_FILE_KEY}" in overrides:
        named.append((overrides[f"{_PREFIX}.{_FILE_KEY}"], _OVERRIDE, (_PREFIX, _FILE_KEY)))
    if isinstance(nested, Mapping) and _FILE_KEY in nested:
        named.append((nested[_FILE_KEY], _OVERRIDE, (_PREFIX, _FILE_KEY)))
    if len(named) == 2 and named[0][0] != named[1][0]:
        what = "set twice, to different files"
        raise fault(_OVERRIDE, named[0][2], what, remedy="keep one of the two").error
    if not named and FILE_VARIABLE in environment:
        place = Place(Source.ENVIRONMENT, FILE_VARIABLE)
        named.append((environment[FILE_VARIABLE], place, ()))
    if not named:
        return None
    value, place, path = named[0]
    if not isinstance(value, str) or not value.strip() or scalar_problem(value):
        shown = brief(value) if isinstance(value, str) else f"a value of type {type(value).__name__}"
        raise fault(
            place,
            path,
            f"expected the name of a file, not {shown}",
            remedy="name the configuration file, or leave it unset to use none",
        ).error
    return Path(value)


def file_tree(path: Path, content: bytes | None = None) -> tuple[Node | None, list[Fault]]:
    """The tree of a file, or None and the reason. ``content`` is what stands in it, where that is known."""
    name = str(path)
    place = Place(Source.FILE, name)
    try:
        raw = _read(path) if content is None else content
        if raw is None:
            remedy = "name the file itself, not a folder, a pipe or a device"
            return None, [fault(place, (), "the configuration is not a regular file", remedy=remedy)]
    except FileNotFoundError:
        remedy = "correct the name, or leave it unset to use none"
        return None, [fault(place, (), "no such configuration file", remedy=remedy)]
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        remedy = "let this user read it" if isinstance(error, PermissionError) else "correct the name"
        return None, [fault(place, (), "the configuration cannot be read", why=why, remedy=remedy)]
    if len(raw) > MAX_BYTES:
        limit = f"more than {MAX_BYTES // 1024} KiB"
        remedy = "check that this is a kvferry configuration"
        return None, [fault(place, (), f"the file is too large: {limit}", remedy=remedy)]

    def place_at(line: int, column: int) -> Place:
        return Place(Source.FILE, name, line, column)

    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
            remedy = "save the file as UTF-8"
            return None, [fault(place_at(1, 1), (), "the file is UTF-16, not UTF-8", remedy=remedy)]
        # The codec that drops the byte order mark counts from behind it.
        good = raw.removeprefix(b"\xef\xbb\xbf")[: error.start]
        line = good.count(b"\n") + 1
        column = len(good[good.rfind(b"\n") + 1 :].decode("utf-8", "replace")) + 1
        remedy = "save the file as UTF-8"
        return None, [fault(place_at(line, column), (), "the file is not UTF-8", remedy=remedy)]
    root, faults = read_document(text, "the file", place_at)
    if root is not None and not isinstance(root.value, dict):
        if root.value is None:
            faults.append(fault(root.place, (), "the file is empty", remedy=EMPTY_REMEDY))
        elif root.value is not Broken.BROKEN:
            what = "expected a mapping at the top of the file"
            glued = isinstance(root.value, str) and re.match(r"\w+:\S", root.value)
            remedy = "put a space behind the colon" if glued else "write lines such as 'tiers: {}'"
            faults.append(fault(root.place, (), what, remedy=remedy))
        root = None
    return root, faults


def _read(path: Path) -> bytes | None:
    """The file, up to a little more than is allowed; None for what is not a regular file."""
    # Opening a pipe would wait for a writer.
    if not stat.S_ISREG(path.stat().st_mode):
        return None
    with path.open("rb") as stream:
        return stream.read(MAX_BYTES + 1)


def environment_tree(environment: Mapping[str, str], *, complete: bool) -> tuple[Node, list[Fault]]:
    """The tree of all variables that begin with ``KVFERRY__``; what follows may have any letter case."""
    branches: list[Node] = []
    faults: list[Fault] = []
    ours = [name for name in environment if name.startswith(VARIABLE_PREFIX)]
    for name in sorted(ours):
        place = Place(Source.ENVIRONMENT, name)
        path = tuple(name[len(VARIABLE_PREFIX) :].lower().split("__"))
        if "" in path or len(path) > MAX_DEPTH:
            what = "the variable does not name a setting"
            remedy = f"write {VARIABLE_PREFIX}KEY, with two underscores between levels"
            faults.append(fault(place, (), what, remedy=remedy))
            continue
        value, problems = read_value(environment[name], path, place)
        faults += problems
        branches.append(branch(path, value, complete=complete))
    return combined(branches, Place(Source.ENVIRONMENT), faults, complete=complete), faults


def override_tree(overrides: Mapping[str, Any], *, complete: bool) -> tuple[Node, list[Fault]]:
    """The tree of ``kvferry`` and ``kvferry.*`` in the engine's extra configuration."""
    branches: list[Node] = []
    faults: list[Fault] = []
    ours = [key for key in overrides if isinstance(key, str) and _meant_for_us(key)]
    for key in sorted(ours):
        prefix, *rest = key.split(".")
        path = tuple(rest)
        if prefix != _PREFIX or "" in path or len(path) > MAX_DEPTH or scalar_problem(key):
            what = f"{brief(key)} does not name a setting"
            remedy = f"write '{_PREFIX}.' and the dotted name of a setting"
            faults.append(fault(_OVERRIDE, (), what, remedy=remedy))
            continue
        if path == (_FILE_KEY,):
            continue
        value = _native(overrides[key], path, faults, complete=complete)
        if not path and isinstance(value.value, dict):
            value.value.pop(_FILE_KEY, None)
        if path or isinstance(value.value, dict):
            branches.append(branch(path, value, complete=complete))
        elif value.value is not Broken.BROKEN:
            what = f"{_PREFIX!r} must hold a mapping of settings"
            remedy = f"write for example {{'{_PREFIX}': {{'chunk_tokens': 256}}}}"
            faults.append(fault(_OVERRIDE, (), what, remedy=remedy))
    return combined(branches, _OVERRIDE, faults, complete=complete), faults


def _meant_for_us(key: str) -> bool:
    """Ours, or so near to it that it would be ignored in silence. Others may have keys of their own."""
    prefix = key.partition(".")[0].lower()
    if prefix.startswith(_PREFIX):
        return True
    return len(prefix) <= 2 * len(_PREFIX) and bool(
        difflib.get_close_matches(prefix, [_PREFIX], n=1, cutoff=0.85)
    )


def _native(value: object, path: ConfigPath, faults: list[Fault], *, complete: bool) -> Node:
    """A JSON value as a node. Text is parsed like text from the environment."""

    def node(result: Any) -> Node:
        return Node(result, _OVERRIDE, _OVERRIDE, complete=complete)

    def broken(what: str, remedy: str) -> Node:
        faults.append(fault(_OVERRIDE, path, what, remedy=remedy))
        return node(Broken.BROKEN)

    if len(path) > MAX_DEPTH:
        return broken(f"nested deeper than {MAX_DEPTH} levels", "check that this is meant for kvferry")
    if value is None or isinstance(value, bool):
        return node(value)
    if isinstance(value, str):
        result, problems = read_value(str.__str__(value), path, _OVERRIDE)
        faults += problems
        return result
    if isinstance(value, (int, float)):
        number = float(value) if isinstance(value, float) else int(value)
        problem = scalar_problem(number)
        return broken(f"the value is {problem}", "write a smaller number") if problem else node(number)
    if isinstance(value, (list, tuple)):
        items = enumerate(value)
        return node(tuple(_native(item, (*path, str(i)), faults, complete=complete) for i, item in items))
    if isinstance(value, Mapping):
        children: dict[str, Node] = {}
        for key, item in value.items():
            if not isinstance(key, str) or scalar_problem(key):
                return broken("a key must be printable text", "write the key in plain letters")
            name = str.__str__(key)
            children[name] = _native(item, (*path, name), faults, complete=complete)
        return node(children)
    what = f"a value of type {type(value).__name__} cannot be configured"
    return broken(what, "write text, a number, true, false, a list or a mapping")
