"""Several configurations, judged one by one and as neighbours on one host, this one or another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from kvferry.api import Fact, FactSpec, HostEnvironment, Severity
from kvferry.compat import ExitCode, Finding, FleetMember, OwnedRule, Report, check_fleet
from kvferry.compat.application import read_paths
from kvferry.compat.catalogue import FactCatalogue
from kvferry.compat.facts_file import DESCRIBABLE, HostDescription, read_description
from kvferry.compat.rendering import finding_text
from kvferry.config import ConfigSources
from kvferry.config.nodes import VARIABLE_PREFIX
from kvferry.plugins import DistributionSource, ProbedFacts, installed_distributions
from kvferry.runtime.catalogue import catalogue_of
from kvferry.runtime.examination import Examination, fault_json, fault_text
from kvferry.runtime.startup import judge, on_this_host, read, waivers_of

SCHEMA_VERSION = 1
"""Of the JSON output. A field may be added within a version; none is renamed, removed or retyped."""

_FACTS_AT_FAULT = "rules were not applied, because the facts file has faults"


@frozen(kw_only=True)
class Together:
    """Everything that was found about some configurations.

    ``description`` is what a file said of another host, ``None`` when this host was judged; ``unsaid``
    are the facts that the rules read and that the file does not give. ``fleet`` is the judgement of
    all configurations as neighbours, ``None`` with fewer than two that could be judged; ``left_out``
    names those that could not.
    """

    examinations: tuple[Examination, ...]
    description: HostDescription | None
    unsaid: tuple[FactSpec, ...]
    fleet: Report | None
    left_out: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    """Variables that are set here and did not count, because another host was judged."""

    def exit_code(self, *, strict: bool = False) -> ExitCode:
        """The code that says most of all parts."""
        codes = [each.exit_code(strict=strict) for each in self.examinations]
        if self.fleet is not None:
            codes.append(self.fleet.exit_code(strict=strict))
        if self.description is not None:
            codes += [ExitCode.ERRORS] if self.description.faults else []
            codes += [ExitCode.WARNINGS] if strict and self.description.warnings else []
        return ExitCode.worst(*codes)

    def text(self) -> str:
        """The facts file, each configuration, and all together; each part ends with its counts.

        Of several, what is found alike about each is told once, and all notes come last.
        """
        blocks = []
        if self.description is not None:
            blocks += [fault_text("error[facts]", fault) for fault in self.description.faults]
            blocks += [fault_text("warning[facts]", fault) for fault in self.description.warnings]
        if len(self.examinations) > 1:
            blocks += self._blocks_of_several()
        else:
            blocks += [each.text() for each in self.examinations]
        if self.ignored:
            blocks.append(self._ignored_text())
        if self.description is not None and self.unsaid:
            blocks.append(self._unsaid_text(self.description))
        return "\n\n".join(blocks)

    def _blocks_of_several(self) -> list[str]:
        alike, own = told_once([(each.name, _shown(each)) for each in self.examinations])
        blocks = [finding_text(each) for each in alike if not _is_note(each)]
        notes = list(alike)
        for examination, findings in zip(self.examinations, own, strict=True):
            blocks += examination.blocks([each for each in findings if not _is_note(each)])
            notes += [evolve(each, instances=(examination.name,)) for each in findings]
        if self.fleet is not None:
            found = self.fleet.shown
            blocks += self.fleet.blocks([each for each in found if not _is_note(each)])
            blocks.append(f"{self._names()}: {self.fleet.summary()}")
            notes += found
        else:
            blocks.append(f"{self._names()}: not judged; fewer than two could be")
        return blocks + [finding_text(each) for each in notes if _is_note(each)]

    def _ignored_text(self) -> str:
        one = len(self.ignored) == 1
        are = "is set here and does" if one else "are set here and do"
        return (
            f"note: {', '.join(self.ignored)} {are} not count, because another host is judged\n"
            f"  fix      nothing to mend; --with-environment counts {'it' if one else 'them'} for every file"
        )

    def to_json(self, *, strict: bool = False) -> dict[str, Any]:
        """Plain data with the same content as :meth:`text`, rules that hold included."""
        description = self.description
        return {
            "schema": SCHEMA_VERSION,
            "exit_code": int(self.exit_code(strict=strict)),
            "facts_file": None
            if description is None
            else {
                "name": description.name,
                "faults": [fault_json(fault) for fault in description.faults],
                "warnings": [fault_json(fault) for fault in description.warnings],
                "not_given": [{"path": spec.path, "meaning": spec.meaning} for spec in self.unsaid],
            },
            "ignored_variables": list(self.ignored),
            "files": [each.to_json(strict=strict) for each in self.examinations],
            "together": None
            if self.fleet is None
            else {"left_out": list(self.left_out), **self.fleet.to_json()},
        }

    def _names(self) -> str:
        named = [each.name for each in self.examinations if each.name not in self.left_out]
        shown = f"together, {', '.join(named)}" if named else "together"
        return f"{shown} (without {', '.join(self.left_out)})" if self.left_out else shown

    def _unsaid_text(self, description: HostDescription) -> str:
        width = max(len(spec.path) for spec in self.unsaid)
        lines = [f"note: {description.name} does not give these facts, which rules read"]
        lines += [f"  missing  {spec.path:<{width}}  {spec.meaning}" for spec in self.unsaid]
        return "\n".join(lines)


def examine_together(
    sources: Sequence[ConfigSources],
    environment: HostEnvironment,
    facts_file: Path | None = None,
    *,
    with_environment: bool = False,
    distributions: DistributionSource = installed_distributions,
) -> Together:
    """Read, load, probe and judge. Never raises for what it finds.

    With ``facts_file`` nothing of this host is probed: the file alone says what the host and the
    engine are like. Variables of this process then count only ``with_environment``.
    """
    ignored: tuple[str, ...] = ()
    if facts_file is not None and not with_environment:
        names = {name for each in sources for name in each.environment}
        ignored = tuple(sorted(name for name in names if name.startswith(VARIABLE_PREFIX)))
        sources = [evolve(each, environment={}) for each in sources]
    readings = [read(each, distributions=distributions, implementations=True) for each in sources]
    description: HostDescription | None = None
    unsaid: tuple[FactSpec, ...] = ()
    if facts_file is None:
        readings = [on_this_host(reading, environment) for reading in readings]
        probed = [reading.plugins.facts(environment) for reading in readings]
    else:
        catalogue = catalogue_of([reading.plugins for reading in readings])
        description = read_description(facts_file, catalogue)
        probed = [ProbedFacts(facts=description.facts)] * len(readings)
        if not description.faults:
            judged = [reading.plugins for reading in readings if reading.config is not None]
            unsaid = _unsaid([rule for each in judged for rule in each.rules()], description, catalogue)
    at_fault = description is not None and bool(description.faults)
    examinations = tuple(
        judge(reading, each, not_judged=_FACTS_AT_FAULT if at_fault else "")
        for reading, each in zip(readings, probed, strict=True)
    )
    host: dict[str, Fact] = {}
    for each in probed:
        host.update(each.facts)
    members = _members(examinations)
    rules = [rule for each in examinations for rule in each.plugins.rules()]
    return Together(
        examinations=examinations,
        description=description,
        unsaid=unsaid,
        fleet=check_fleet(rules, members, host) if len(members) > 1 else None,
        left_out=tuple(each.name for each in examinations if each.report is None),
        ignored=ignored,
    )


def _members(examinations: Sequence[Examination]) -> list[FleetMember]:
    """Those that could be judged. One file named twice is two instances that start from it."""
    members: list[FleetMember] = []
    judged = [each for each in examinations if each.config is not None and each.report is not None]
    for each, label in zip(judged, _labels(judged), strict=True):
        assert each.config is not None
        assert each.report is not None
        members.append(
            FleetMember(
                label=_unique(label, "{}-{}", [member.label for member in members]),
                name=_unique(each.name, "{} ({})", [member.name for member in members]),
                facts=each.facts,
                report=each.report,
                waivers=waivers_of(each.config),
            )
        )
    return members


def _labels(judged: Sequence[Examination]) -> list[str]:
    """For each what tells it apart in a path: its file's name, else its instance's, else as much of the
    file's path as it takes."""
    stems = [_label(Path(each.name).stem) or "instance" for each in judged]
    names = [_label(each.config.instance or "") if each.config is not None else "" for each in judged]
    paths = [Path(each.name).with_suffix("").parts for each in judged]
    longest = max(map(len, paths), default=0)
    tails = [[_label("/".join(path[-depth:])) for path in paths] for depth in range(2, longest + 1)]
    return [
        next((own[at] for own in (stems, names, *tails) if own[at] and own.count(own[at]) == 1), stems[at])
        for at in range(len(judged))
    ]


def _label(text: str) -> str:
    return re.sub(r"[^\w-]", "_", text.strip("./"))


def told_once(
    findings: Sequence[tuple[str, Sequence[Finding]]],
) -> tuple[list[Finding], list[list[Finding]]]:
    """What several configurations, each with its name, are told alike, once and with their names; and
    for each the rest. Only what rests on nothing but the host can be alike."""
    alike: list[Finding] = []
    for at, (_, mine) in enumerate(findings):
        for finding in mine:
            if finding in alike or any(finding in before for _, before in findings[:at]):
                continue
            if sum(finding in each for _, each in findings) > 1 and finding.waiver is None:
                alike.append(finding)
    named = [
        evolve(finding, instances=tuple(name for name, each in findings if finding in each))
        for finding in alike
    ]
    named.sort(key=Finding.sort_key)
    return named, [[finding for finding in mine if finding not in alike] for _, mine in findings]


def _shown(examination: Examination) -> Sequence[Finding]:
    return () if examination.report is None else examination.report.shown


def _is_note(finding: Finding) -> bool:
    return finding.rule.severity is Severity.NOTE and finding.waiver is None


def _unique(text: str, form: str, taken: Sequence[str]) -> str:
    candidate, number = text, 1
    while candidate in taken:
        number += 1
        candidate = form.format(text, number)
    return candidate


def _unsaid(
    rules: Sequence[OwnedRule], description: HostDescription, catalogue: FactCatalogue
) -> tuple[FactSpec, ...]:
    found: dict[str, FactSpec] = {}
    for owned in rules:
        for path in read_paths(owned):
            entry = catalogue.find(path)
            if entry is None or entry.spec.source not in DESCRIBABLE:
                continue
            if entry.spec.path not in description.facts:
                found.setdefault(entry.spec.path, entry.spec)
    return tuple(found[path] for path in sorted(found))
