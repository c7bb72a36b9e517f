"""YAML read strictly: the 1.2 core schema, every value with its line and column.

Works on the parser's events, because PyYAML's own construction turns ``no`` into a boolean,
``12:30`` into 750 and ``0123`` into 83, and keeps the last of two equal keys. Anchors, aliases,
tags and merge keys are refused: a configuration that says what it means needs none of them, and no
text can then grow while it is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import yaml
from attrs import evolve
from yaml.reader import Reader

from kvferry.config.nodes import (
    Broken,
    ConfigPath,
    Fault,
    Node,
    Place,
    Value,
    brief,
    fault,
)

MAX_BYTES = 256 * 1024
"""A configuration is a few kilobytes; the bound keeps a wrong file from costing minutes."""
MAX_DEPTH = 32

_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
# Leading zeros mean octal to YAML 1.1 and decimal to 1.2, so such numbers stay text.
_DECIMAL = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+))")
_INFINITE = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")
_NOT_A_NUMBER = re.compile(r"\.(?:nan|NaN|NAN)")
_MAX_NUMBER_LENGTH = 100

_UNPRINTABLE: re.Pattern[str] = Reader.NON_PRINTABLE


NO_SUBSTITUTION = (
    "write the value out, or set the key by its own variable, such as KVFERRY__TIERS__CPU__CAPACITY: "
    "names of variables in the file are not replaced"
)
EMPTY_REMEDY = "write at least one line such as 'tiers: {}', or name no file"
_CHECK_SYNTAX = "check quotes, brackets and indentation here and in the line before"
_TOKENS = (
    ("'<document start>'", "another document"),
    ("<block end>", "the end of the section"),
    ("'<block mapping start>'", "a key at another depth"),
    ("'<block sequence start>'", "a list at another depth"),
    ("'<stream end>'", "the end of the text"),
)
"""The parser's names of what it meets, and ours."""
_SYNTAX_REMEDIES = (
    ("mapping values are not allowed", "put quotes around a value that holds ': ', or check the indentation"),
    ("expected ':'", "write 'key: value', with a space behind the colon"),
    ("cannot start any token", "put quotes around the value"),
    ("unknown escape character", "write the text in single quotes, which know no escapes"),
    ("another document", "keep one document in a file"),
    ("incompatible YAML document", "remove the line"),
    ("the end of the text", "close the bracket or brace that is open"),
    ("end of stream", "close the quote that is open"),
    ("expected ',' or", "put a comma between items, or close the bracket or brace"),
    ("but found '}'", "remove it, or open it before"),
    ("but found ']'", "remove it, or open it before"),
    ("the end of the section", "let all keys of a section begin in the same column"),
)
"""By words in the parser's problem; the first that fits counts."""


class _Stopped(Exception):
    """Reading cannot go on; the fault is recorded."""


def resolve_plain(text: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar under the YAML 1.2 core schema."""
    if len(text) > _MAX_NUMBER_LENGTH:
        return text
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if match := _INFINITE.fullmatch(text):
        return float(f"{match.group(1)}inf")
    return float("nan") if _NOT_A_NUMBER.fullmatch(text) else text


def scalar_problem(value: object) -> str:
    """Why a scalar is refused whatever it is meant for, or empty text."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "a whole number beyond 64 bits"
    if isinstance(value, str) and (match := _UNPRINTABLE.search(value)):
        return f"the unprintable character U+{ord(match.group()):04X}"
    return ""


def read_document(text: str, name: str, place_at: Callable[[int, int], Place]) -> _Outcome:
    """Read a whole file's text. ``place_at(line, column)`` counts from 1; ``name`` is for messages.

    The node is None when nothing usable could be read; then there is at least one fault.
    """
    if match := _UNPRINTABLE.search(text):
        before = text[: match.start()]
        line = before.count("\n") + 1
        column = match.start() - (before.rfind("\n") + 1) + 1
        what = f"{name} holds {scalar_problem(match.group())}"
        return None, [fault(place_at(line, column), (), what, remedy="write plain UTF-8 text")]
    return _Reading(text, name, place_at, ()).run()


def read_value(text: str, path: ConfigPath, place: Place) -> tuple[Node, list[Fault]]:
    """Read a value given as text outside a file: one scalar, or ``[...]`` or ``{...}``.

    Only text that starts with a bracket, a brace or a quote is YAML syntax; anything else is taken
    whole, so that ``tcp://*:5555`` and ``a: b`` need no quoting.
    """
    broken = Node(Broken.BROKEN, place, place)
    stripped = text.strip(" ")
    problem = scalar_problem(text)
    if not problem and len(text) > MAX_BYTES:
        problem = f"more than {MAX_BYTES // 1024} KiB"
    if problem:
        return broken, [fault(place, path, f"the value holds {problem}", remedy="write plain, short text")]
    if stripped[:1] not in ("[", "{", "'", '"'):
        value = resolve_plain(stripped)
        if problem := scalar_problem(value):
            return broken, [fault(place, path, f"the value is {problem}", remedy="write a smaller number")]
        return Node(value, place, place, written=stripped), []
    node, faults = _Reading(stripped, "the value", lambda _line, _column: place, path).run()
    return node or broken, faults


_Outcome: TypeAlias = tuple[Node | None, list[Fault]]


class _Reading:
    """One pass over one text."""

    def __init__(self, text: str, name: str, place_at: Callable[[int, int], Place], path: ConfigPath) -> None:
        self._name = name
        self._place_at = place_at
        self._path = path
        self._faults: list[Fault] = []
        self._text = text
        # PyYAML's stubs leave the event methods and their marks untyped.
        self._loader: Any = yaml.SafeLoader(text)

    def run(self) -> _Outcome:
        try:
            return self._document(), self._faults
        except _Stopped:
            return None, self._faults
        except yaml.MarkedYAMLError as error:
            self._syntax(error)
            return None, self._faults
        except (yaml.YAMLError, ValueError, OverflowError):
            # The scanner lets the errors of chr() and int() through, for "\UFFFFFFFF" and the like.
            what = "not valid YAML: an escape or a version is out of range"
            remedy = "write the text in single quotes, which know no escapes"
            self._fail(self._loader.get_mark(), what, remedy=remedy)
            return None, self._faults
        finally:
            self._loader.dispose()

    def _document(self) -> Node | None:
        self._next()  # start of the stream
        if isinstance(self._next(), yaml.StreamEndEvent):
            self._faults.append(
                fault(self._place_at(1, 1), self._path, f"{self._name} is empty", remedy=EMPTY_REMEDY)
            )
            return None
        start = self._loader.peek_event()
        node = self._node(self._path, 0)
        if self._path and getattr(start, "flow_style", True) is False:
            remedy = "write a mapping in braces and a list in brackets"
            self._fail(start.start_mark, "block style has no place in a value of one line", remedy=remedy)
            raise _Stopped
        self._next()  # end of the document
        after = self._next()
        if isinstance(after, yaml.DocumentStartEvent):
            self._fail(
                after.start_mark,
                "a second YAML document starts here",
                remedy="keep one document in a file",
            )
            raise _Stopped
        return node

    def _node(self, path: ConfigPath, depth: int) -> Node:
        event = self._next()
        place = self._at(event.start_mark)
        if depth > MAX_DEPTH:
            what = f"nested deeper than {MAX_DEPTH} levels"
            self._fail(event.start_mark, what, remedy="check the brackets and the indentation")
            raise _Stopped
        if isinstance(event, yaml.AliasEvent):
            self._fail(
                event.start_mark,
                "aliases are not supported",
                path,
                remedy="write the value out",
            )
            return Node(Broken.BROKEN, place, place)
        self._refuse_decorations(event, path)
        match event:
            case yaml.MappingStartEvent():
                return self._mapping(path, place, depth)
            case yaml.SequenceStartEvent():
                return self._sequence(path, place, depth)
            case _:
                return self._scalar(event, path, place)

    def _refuse_decorations(self, event: Any, path: ConfigPath) -> None:
        if event.anchor is not None:
            self._fail(
                event.start_mark,
                "anchors are not supported",
                path,
                remedy="remove the anchor",
            )
        if event.tag is not None:
            self._fail(event.start_mark, "tags are not supported", path, remedy="remove it")

    def _scalar(self, event: Any, path: ConfigPath, place: Place) -> Node:
        plain = event.style is None
        value: Value = resolve_plain(event.value) if plain else _joined(event.value)
        if problem := scalar_problem(value):
            remedy = "write a smaller number" if isinstance(value, int) else "remove it"
            self._fail(event.start_mark, f"the value holds {problem}", path, remedy=remedy)
            value = Broken.BROKEN
        return Node(value, place, place, quoted=event.style in ("'", '"'))

    def _sequence(self, path: ConfigPath, place: Place, depth: int) -> Node:
        items: list[Node] = []
        while not self._loader.check_event(yaml.SequenceEndEvent):
            items.append(self._node((*path, str(len(items))), depth + 1))
        self._next()
        return Node(tuple(items), place, place)

    def _mapping(self, path: ConfigPath, place: Place, depth: int) -> Node:
        children: dict[str, Node] = {}
        complete = True
        while not self._loader.check_event(yaml.MappingEndEvent):
            mark = self._loader.peek_event().start_mark
            key = self._node(path, depth + 1)
            name = self._key(key, mark, path)
            child = self._node(path if name is None else (*path, name), depth + 1)
            if name is None:
                complete = False
            elif name in children:
                first = children[name].key_place
                self._fail(
                    mark,
                    "duplicate key" if first == key.place else f"duplicate key, first at {first}",
                    (*path, name),
                    remedy="keep one of the two",
                )
            else:
                children[name] = evolve(child, key_place=key.place)
        self._next()
        return Node(children, place, place, complete=complete)

    def _key(self, key: Node, mark: Any, path: ConfigPath) -> str | None:
        value = key.value
        if value == "<<" and not key.quoted:
            self._fail(mark, "merge keys are not supported: <<", path, remedy="write the keys out")
            return None
        if isinstance(value, str):
            return value
        if value is not Broken.BROKEN:
            container = isinstance(value, (dict, tuple))
            self._fail(
                mark,
                "a key must be text, not " + ("a list or mapping" if container else brief(_written(value))),
                path,
                remedy="write a name before the colon" if container else "put quotes around the key",
            )
        return None

    def _syntax(self, error: yaml.MarkedYAMLError) -> None:
        mark = error.problem_mark or error.context_mark or self._loader.get_mark()
        problem = error.problem or error.context or "it cannot be parsed"
        for token, words in _TOKENS:
            problem = problem.replace(token, words)
        if "'\\t'" in problem:
            self._fail(mark, "a tab stands where YAML wants spaces", remedy="indent with spaces")
            return
        begun = error.context_mark
        if self._text[: mark.index].endswith("$") and "got '{'" in problem:
            # What stands around it is sound, so the parser's words would lead astray.
            self._fail(
                mark, "not valid YAML: a brace stands in a value without quotes", remedy=NO_SUBSTITUTION
            )
            return
        remedy = next((fix for words, fix in _SYNTAX_REMEDIES if words in problem), _CHECK_SYNTAX)
        if "end of stream" in problem or "end of the text" in problem or "expected ':'" in problem:
            # The parser notices at the end of the text; the mistake stands where something began.
            mark = begun or mark
        why = error.context or ""
        apart = begun is not None and (begun.line, begun.column) != (mark.line, mark.column)
        if apart and why and not self._path:
            why += f" that begins at {self._at(begun)}"
        self._fail(mark, f"not valid YAML: {problem}", why=why, remedy=remedy)

    def _next(self) -> Any:
        return self._loader.get_event()

    def _at(self, mark: Any) -> Place:
        return self._place_at(mark.line + 1, mark.column + 1)

    def _fail(
        self,
        mark: Any,
        what: str,
        path: ConfigPath | None = None,
        *,
        why: str = "",
        remedy: str = "",
    ) -> None:
        where = self._path if path is None else path
        self._faults.append(fault(self._at(mark), where, what, why=why, remedy=remedy))


def _joined(text: str) -> str:
    """``text`` with pairs of surrogates joined, as JSON writes what lies beyond 16 bits."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return text


def _written(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
