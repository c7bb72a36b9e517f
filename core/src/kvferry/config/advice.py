"""What a user can do about a value or key that is not what was expected."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

from kvferry.config.nodes import VARIABLE_PREFIX, ConfigPath, Node, Source, brief
from kvferry.config.yaml_text import resolve_plain

_SERVICE_VALUE = re.compile(r"(?:tcp|udp|sctp)://\S+:[0-9]+")
_SERVICE_NAME = re.compile(r".*_(?:service_host|service_port\w*|port(?:_[0-9]+_(?:tcp|udp|sctp)\w*)?)")
_SERVICE_REMEDY = (
    "Kubernetes makes such variables for a Service: rename that Service, or set enableServiceLinks: false "
    "in the pod's spec"
)
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
    return value_remedy(node) or "write a list such as [a, b]"


def mapping_remedy(node: Node) -> str:
    """For a value that is no mapping."""
    if node.value is None:
        return "write {} or remove the key"
    return value_remedy(node) or "write lines of 'key: value' below it"


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
        return "write the value without brackets"
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
