"""Another host's facts, read from a file as strictly as a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from kvferry.api import Fact, FactKind, Facts, FactSource, FactSpec, KVFerryError
from kvferry.api.units import ByteSize, Duration, format_duration, format_size
from kvferry.compat.catalogue import FactCatalogue, OwnedFactSpec
from kvferry.config.fields import UNIT_KINDS
from kvferry.config.nodes import Fault, Node, Place, Source, dotted, fault, in_order, printable
from kvferry.config.structure import Rejected, Structurer
from kvferry.config.yaml_text import MAX_BYTES, read_document

DESCRIBABLE = (FactSource.HOST, FactSource.ENGINE)
"""What such a file may say. The rest follows from the configuration and its plugins."""


_EMPTY_REMEDY = (
    "write lines such as 'host.memory_bytes: 512GiB'; 'kvferry doctor --format facts' writes such a file"
)


_UNKNOWN_REMEDY = "correct it, or remove it where it is not known"


@frozen(kw_only=True)
class HostDescription:
    """What a file says of another host and of the engine there.

    Nothing may be judged while there are ``faults``. ``warnings`` are about facts that nobody knows;
    those are left out of ``facts``.
    """

    name: str
    facts: Mapping[str, Fact] = field(factory=dict)
    faults: tuple[KVFerryError, ...] = ()
    warnings: tuple[KVFerryError, ...] = ()


def read_description(path: Path, catalogue: FactCatalogue) -> HostDescription:
    """Read YAML or JSON of facts by path, such as ``host.memory_bytes: 512GiB``; dots may as well be
    written as nested mappings. Never raises for what the file holds."""
    name = printable(str(path))
    root, faults = _tree(path)
    if root is None:
        return HostDescription(name=name, faults=in_order(faults))
    reading = _Reading(catalogue, faults)
    reading.read(root)
    return HostDescription(
        name=name,
        facts=reading.facts,
        faults=in_order(reading.faults),
        warnings=in_order(reading.warnings),
    )


def description_text(facts: Facts, catalogue: FactCatalogue) -> str:
    """A file that :func:`read_description` reads on another machine: what is known of this host, and
    as remarks what only its engine will know."""
    host = [entry.spec for entry in catalogue.entries if entry.spec.source is FactSource.HOST]
    unknown = [spec for spec in host if spec.path not in facts]
    known = [
        (_lines(path, facts[path].value, entry.spec.kind), entry.spec.meaning)
        for path in sorted(facts)
        if (entry := catalogue.find(path)) is not None and entry.spec.source is FactSource.HOST
    ]
    engine = [entry.spec for entry in catalogue.entries if entry.spec.source is FactSource.ENGINE]
    width = max((len(first) for (first, *_), _ in known), default=0)
    lines = ["# What 'kvferry doctor --format facts' found; for 'kvferry check --facts' on another machine."]
    for (first, *items), meaning in known:
        lines += [f"{first:<{width}}  # {meaning}", *items]
    if unknown:
        lines += ["", "# Not found here. What it is there may be added:", *_remarks(unknown)]
    if engine:
        lines += ["", "# No engine runs here. What it will be like may be added:", *_remarks(engine)]
    return "\n".join(lines) + "\n"


def _remarks(specs: Iterable[FactSpec]) -> Iterator[str]:
    for spec in specs:
        yield f"# {spec.path}: {spec.sample or _SAMPLES[spec.kind]}  # {spec.meaning}"


def _lines(path: str, value: object, kind: FactKind) -> list[str]:
    """A fact as YAML: one line, or one more for each item of a list, which may be long."""
    if isinstance(value, tuple) and value:
        return [f"{path}:", *(f"  - {json.dumps(item)}" for item in value)]
    return [f"{path}: {_written(value, kind)}"]


def _written(value: object, kind: FactKind) -> str:
    if kind is FactKind.SIZE and isinstance(value, int):
        return format_size(value)
    if kind is FactKind.DURATION and isinstance(value, int | float):
        return format_duration(value)
    # JSON is YAML, and its text needs no thought about quotes.
    return json.dumps(list(value) if isinstance(value, tuple) else value)


class _Reading:
    """One pass over one tree."""

    def __init__(self, catalogue: FactCatalogue, faults: list[Fault]) -> None:
        self.facts: dict[str, Fact] = {}
        self.warnings: list[Fault] = []
        self._catalogue = catalogue
        self._structurer = Structurer(UNIT_KINDS, _no_section)
        self._structurer.faults += faults
        self._seen: dict[str, Node] = {}

    @property
    def faults(self) -> list[Fault]:
        return self._structurer.faults

    def read(self, root: Node) -> None:
        for path, node in _flat(root, ""):
            node = evolve(node, path=tuple(path.split(".")))
            first = self._seen.setdefault(path, node)
            if first is not node:
                self._fault(node, f"given twice, first at {first.key_place}", "keep one of the two")
                continue
            entry = self._catalogue.find(path)
            if entry is None:
                self._unknown(node, path)
            elif entry.spec.source not in DESCRIBABLE:
                what = f"comes from the {entry.spec.source.value}, not from the host"
                self._fault(node, what, "remove it here, and set it in the configuration itself")
            else:
                self._take(node, path, entry)

    def _take(self, node: Node, path: str, entry: OwnedFactSpec) -> None:
        try:
            value = self._structurer.structure(node, _ANNOTATIONS[entry.spec.kind])
        except Rejected:
            return
        problem = _out_of_range(value, entry.spec)
        if problem:
            self._structurer.record(node, problem, remedy=f"{_UNKNOWN_REMEDY}: {entry.spec.meaning}")
            return
        self.facts[path] = Fact(path=path, value=value, origin=str(node.place))

    def _unknown(self, node: Node, path: str) -> None:
        near = self._catalogue.nearest(path, DESCRIBABLE)
        beside = [] if near else self._catalogue.beside(path, DESCRIBABLE)
        remedy = "remove it, or list the plugin that it is for"
        if beside:
            remedy += f"; known are: {', '.join(beside)}"
        self.warnings.append(
            fault(
                node.key_place,
                node.path,
                "no loaded plugin knows this fact, so no rule reads it",
                remedy=f"did you mean {near!r}? Otherwise {remedy}" if near else remedy,
            )
        )

    def _fault(self, node: Node, what: str, remedy: str) -> None:
        self._structurer.faults.append(fault(node.key_place, node.path, what, remedy=remedy))


def _flat(node: Node, prefix: str) -> Iterator[tuple[str, Node]]:
    assert isinstance(node.value, dict)
    for key, child in node.value.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(child.value, dict) and child.value:
            yield from _flat(child, path)
        else:
            yield path, child


def _tree(path: Path) -> tuple[Node | None, list[Fault]]:
    name = str(path)
    whole = Place(Source.FILE, name)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        why = error.strerror or str(error)
        return None, [fault(whole, (), "the facts file cannot be read", why=why, remedy="correct its name")]
    except UnicodeDecodeError:
        return None, [fault(whole, (), "the facts file is not UTF-8", remedy="save it as UTF-8")]
    if len(raw) > MAX_BYTES:
        return None, [fault(whole, (), f"the facts file is too large: more than {MAX_BYTES // 1024} KiB")]
    if not _says_something(text):
        place = Place(Source.FILE, name, 1, 1)
        return None, [fault(place, (), "the facts file is empty", remedy=_EMPTY_REMEDY)]
    root, faults = read_document(
        text, "the facts file", lambda line, column: Place(Source.FILE, name, line, column)
    )
    if root is not None and not isinstance(root.value, dict):
        remedy = "write lines such as 'host.memory_bytes: 512GiB'"
        faults.append(fault(root.place, (), "expected a mapping of facts", remedy=remedy))
        root = None
    return root, faults


def _says_something(text: str) -> bool:
    """False for a file of blank lines and remarks."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())


def _out_of_range(value: Any, spec: FactSpec) -> str:
    """What is wrong with a value that has the right type, or empty text."""
    least = spec.at_least
    if least is None:
        least = 0 if spec.kind is FactKind.COUNT else None
    if least is None or value >= least:
        return ""
    if least == 0:
        return "must not be negative"
    return f"must be at least {_written(int(least) if least == int(least) else least, spec.kind)}"


def _no_section(structurer: Structurer, node: Node, cls: type[Any]) -> Any:
    raise structurer.reject(node, f"no {cls.__name__} at {dotted(node.path)}")


_ANNOTATIONS: Mapping[FactKind, Any] = {
    FactKind.SIZE: ByteSize,
    FactKind.DURATION: Duration,
    FactKind.COUNT: int,
    FactKind.NUMBER: float,
    FactKind.FLAG: bool,
    FactKind.TEXT: str,
    FactKind.TEXTS: tuple[str, ...],
    FactKind.MAPPING: Mapping[str, str],
}
_SAMPLES: Mapping[FactKind, str] = {
    FactKind.SIZE: "4MiB",
    FactKind.DURATION: "30s",
    FactKind.COUNT: "1",
    FactKind.NUMBER: "1.0",
    FactKind.FLAG: "true",
    FactKind.TEXT: "cpu",
    FactKind.TEXTS: "[full]",
    FactKind.MAPPING: "{}",
}
