"""What a user can do about a value or key that is not what was expected."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Mapping

from kvferry.config.nodes import VARIABLE_PREFIX, ConfigPath, Node, Source, brief
from kvferry.config.yaml_text import resolve_plain

_SERVICE_VALUE = re.compile(r"(?:tcp|udp|sctp)://\S+:[0-9]+")
_SERVICE_NAME = re.compile(r".*_(?:service_host|service_port\w*|port(?:_[0-9]+_(?:tcp|udp|sctp)\w*)?)")
_PERCENT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?%")
_SERVICE_REMEDY = (
    "Kubernetes makes such variables for a Service: rename that Service, or set enableServiceLinks: false "
    "in the pod's spec"
)
_SUBSTITUTION = re.compile(r"\$\{[^}]*\}|\$\([^)]*\)|\$[A-Z_]+")
_WORD = re.compile(r"[A-Za-z0-9][\w-]{0,40}")
_MAX_COMPARED = 64
"""Longer words are not misspelt ones, and comparing them would take long."""


def boolean_remedy(node: Node) -> str:
    """For a value that is neither true nor false."""
    value = node.value
    if isinstance(value, str):
        word = value.lower()
        if word in ("true", "false"):
            return "remove the quotes" if node.quoted else f"write {word}"
        if word in ("yes", "on", "y"):
            return "write true"
        if word in ("no", "off", "n"):
            return "write false"
    if value in (0, 1) and not node.secret:
        return f"write {str(bool(value)).lower()}"
    return value_remedy(node) or "write true or false"


def number_remedy(node: Node, number: type) -> str:
    """For a value that is no number of this kind, whole (``int``) or any (``float``)."""
    value = node.value
    example = "write digits alone, such as 256" if number is int else "write a number such as 0.5"
    if node.secret:
        return example
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return f"write {int(value)}"
    if isinstance(value, str):
        if node.quoted and isinstance(resolve_plain(value), number):
            return "remove the quotes"
        if number is float and (match := _PERCENT.fullmatch(value)):
            return f"write {float(match[1]) / 100:g}"
        if re.fullmatch(r"[-+]?[0-9_]{1,40}", value) and value.strip("+-_"):
            return f"write {int(value.replace('_', ''))}, without leading zeros or underscores"
    return value_remedy(node) or example


def list_remedy(node: Node) -> str:
    """For a value that is no list."""
    value = node.value
    if isinstance(value, str) and not node.secret:
        if re.match(r"-\w", value):
            return "put a space behind the dash"
        if "," in value:
            return f"write a list: [{value}]" if value.isprintable() and len(value) < 60 else "write [a, b]"
        return f"write a list of one: [{brief(value)}]"
    if isinstance(value, dict) and node.place.source > Source.FILE:
        return "give the whole list: its items cannot be set one by one"
    if isinstance(value, dict) and value and all(item.value is None for item in value.values()):
        return f"write a list: [{', '.join(value)}]"
    return value_remedy(node) or "write a list such as [a, b]"


def mapping_remedy(node: Node, value: str = "") -> str:
    """For a value that is no mapping. ``value`` stands for what each key of it would have."""
    if node.value is None:
        return "write {} or remove the key"
    keys = node.value if isinstance(node.value, tuple) else (node,)
    words = [key.value for key in keys if isinstance(key.value, str) and _WORD.fullmatch(key.value)]
    if value and words and len(words) == len(keys) and not node.secret:
        pairs = ", ".join(f"{word}: {value}" for word in words)
        return f"write {node.path[-1]}: {{{pairs}}}" if node.path else f"write {{{pairs}}}"
    if isinstance(node.value, tuple):
        return "write a mapping, lines of 'name: ...', in place of the list"
    return value_remedy(node) or "write lines of 'key: value' below it"


def selecting_remedy(node: Node) -> str:
    """For a name where a section belongs that selects by ``use`` and needs no other key; empty text for any
    other value."""
    named = isinstance(node.value, str) and not node.secret and _WORD.fullmatch(node.value)
    return f"write {{use: {node.value}}}" if named else ""


def unnamed_remedy(node: Node, loose: list[str], empty: list[str]) -> str:
    """For keys that stand in a mapping of names and belong into what a name stands for. ``empty`` are
    names without anything below them."""
    listed = ", ".join(map(repr, loose))
    at = node.value[loose[0]].key_place.source if isinstance(node.value, dict) else Source.FILE
    if at is not Source.FILE:
        return f"put a name in between: {spelled((*node.path, '<name>', loose[0]), at)}"
    if len(empty) == 1:
        return f"indent {listed}, so that they stand below {empty[0]!r}"
    use = node.value.get("use") if isinstance(node.value, dict) else None
    named = use is not None and isinstance(use.value, str) and _WORD.fullmatch(use.value)
    name = use.value if use is not None and named else "name"
    inner = f"use: {name}, ..." if named else f"{loose[0]}: ..."
    return f"put a name in between: write {node.path[-1]}: {{{name}: {{{inner}}}}}"


def substitution_remedy(node: Node) -> str:
    """For a text that names a variable to be put in its place; empty text for any other value."""
    written = isinstance(node.value, str) and not node.secret and node.place.source is Source.FILE
    if not written or not _SUBSTITUTION.search(str(node.value)):
        return ""
    remedy = "names of variables are not replaced: write the value out"
    if not all(re.fullmatch(r"[a-z]\w*", key) for key in node.path):
        return remedy  # An item of a list, or a key that no variable's name can spell.
    return f"{remedy}, or set {spelled(node.path, Source.ENVIRONMENT)}"


def choice_remedy(node: Node, choices: Iterable[object]) -> str:
    """For a value that is none of ``choices``."""
    if isinstance(node.value, bool):
        return "put quotes around it"
    words = [choice for choice in choices if isinstance(choice, str)]
    near = nearest(node.value, words) if isinstance(node.value, str) and not node.secret else ""
    if near:
        return f"did you mean {near!r}?"
    return value_remedy(node) or "write one of them"


def value_remedy(node: Node) -> str:
    """For any value, or empty text where nothing is known that would help."""
    value = node.value
    if value is None:
        if node.place.source is Source.ENVIRONMENT:
            return "give the variable a value, or unset it"
        return "give it a value, or remove the key"
    if isinstance(value, tuple) and len(value) == 1:
        return "write the value itself, not a list of one"
    if isinstance(value, str) and node.place.source is Source.ENVIRONMENT and not node.secret:
        return _SERVICE_REMEDY if _SERVICE_VALUE.fullmatch(value) else ""
    return ""


def key_remedy(node: Node, key: str, known: list[str]) -> str:
    """For a key that is none of ``known``; ``node`` is its value."""
    source = node.key_place.source
    if source is Source.ENVIRONMENT:
        if node.path == ("config",):
            return "name the file with KVFERRY_CONFIG"
        if _SERVICE_NAME.fullmatch(key) and not _misspelt(key, known):
            return _SERVICE_REMEDY
        section = next((name for name in known if key.startswith(f"{name}_")), "")
        if section:
            return f"put two underscores between levels: {spelled((*node.path[:-1], section), source)}__..."
    if key.startswith("//"):
        return "begin a comment with '#'"
    if near := nearest(key, known):
        return f"did you mean {spelled((*node.path[:-1], near), source)}?"
    return "known keys: " + ", ".join(known) if known else "this section takes no keys"


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes makes such a variable for a Service."""
    return bool(_SERVICE_VALUE.fullmatch(value) or _SERVICE_NAME.fullmatch(name.lower()))


def wrapped_remedy(children: Mapping[str, Node], name_key: str, known: list[str]) -> str:
    """For a mapping whose one key is the name of a thing and holds the keys that belong beside the
    name; empty text for any other."""
    if len(children) != 1:
        return ""
    ((name, inner),) = children.items()
    if name in known or nearest(name, known) or not _WORD.fullmatch(name):
        return ""
    if inner.value is None:
        return "remove the colon"
    if not isinstance(inner.value, dict):
        return ""
    pairs = {name_key: name} | {key: item.value for key, item in inner.value.items()}
    plain = all(isinstance(item, str) and _WORD.fullmatch(item) for pair in pairs.items() for item in pair)
    return f"write {{{', '.join(f'{k}: {v}' for k, v in pairs.items())}}}" if plain else ""


def _misspelt(key: str, known: list[str]) -> bool:
    """Whether the key is so near to a known one that nothing else needs to be thought of."""
    return len(key) <= _MAX_COMPARED and bool(difflib.get_close_matches(key, known, n=1, cutoff=0.85))


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was most likely meant, or empty text."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1) if len(word) <= _MAX_COMPARED else []
    return near[0] if near else ""


def spelled(path: ConfigPath, source: Source) -> str:
    """How the user would write ``path`` in the source where the mistake stands."""
    if source is Source.ENVIRONMENT:
        return VARIABLE_PREFIX + "__".join(path).upper()
    return repr("kvferry." + ".".join(path)) if source is Source.OVERRIDE else repr(path[-1])


def odd_letters(text: str) -> str:
    """Names letters that look like plain ones or like nothing, which a reader cannot see."""
    odd = dict.fromkeys(letter for letter in text if not letter.isascii())
    names = [f"U+{ord(letter):04X} {unicodedata.name(letter, '')}".strip() for letter in odd]
    return f"it holds {', '.join(names[:3])}" if names else ""
