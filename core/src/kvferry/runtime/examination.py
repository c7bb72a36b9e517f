"""Everything that was found about one configuration, as text, as JSON and as an exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from kvferry.api import Fact, KVFerryError
from kvferry.compat import ExitCode, Finding, JudgedWaiver, Report
from kvferry.config import Config
from kvferry.plugins import LoadedPlugins

_NOT_JUDGED = "rules were not applied, because the configuration has faults"


@frozen(kw_only=True)
class Examination:
    """The result of reading, loading and judging one configuration.

    ``skipped`` are faults of plugins with ``on_error: skip``. ``report`` is ``None`` when the
    configuration could not be read as a whole.
    """

    name: str
    plugins: LoadedPlugins
    config: Config | None
    facts: Mapping[str, Fact]
    config_faults: tuple[KVFerryError, ...]
    plugin_faults: tuple[KVFerryError, ...]
    skipped: tuple[KVFerryError, ...]
    report: Report | None
    waivers: tuple[JudgedWaiver, ...] = ()
    """Of rules that nobody owns, while there is no report to tell them."""
    not_judged: str = ""
    """Why there is no report although the configuration has no faults."""

    def exit_code(self, *, strict: bool = False) -> ExitCode:
        """The code that says most of all parts."""
        codes = [ExitCode.BROKEN_PLUGIN] if self.plugin_faults else []
        codes += [ExitCode.ERRORS] if self.config_faults else []
        codes += [ExitCode.WARNINGS] if strict and self.skipped else []
        if self.report is not None:
            codes.append(self.report.exit_code(strict=strict))
        return ExitCode.worst(*codes)

    @property
    def prevents_start(self) -> bool:
        """An error, an unverified error or a broken plugin."""
        return self.exit_code() is not ExitCode.CLEAN

    def text(self) -> str:
        """Faults, broken plugins and rules in one report that ends with a line of counts."""
        return "\n\n".join(self.blocks())

    def blocks(self, findings: Iterable[Finding] | None = None) -> list[str]:
        """The parts of :meth:`text`; of the rules' findings only those given, if any are."""
        blocks = [fault_text("error[config]", fault) for fault in self.config_faults]
        blocks += [fault_text("error[plugin]", fault) for fault in self.plugin_faults]
        blocks += [fault_text("warning[plugin]", fault) for fault in self.skipped]
        blocks += [waiver.text() for waiver in self.waivers]
        if self.report is not None:
            blocks += self.report.blocks(findings)
        return [*blocks, self.summary()]

    def notices(self) -> str:
        """What a start that goes on should log: :meth:`text`, or nothing when nothing was found."""
        found = self.skipped or (self.report is not None and self.report.remarkable)
        return self.text() if found else ""

    def summary(self) -> str:
        """One line: ``c.yaml: 15 checks: 13 ok, 2 not applicable``."""
        parts = []
        for count, one, many in (
            (len(self.config_faults), "configuration fault", "configuration faults"),
            (len(self.plugin_faults), "broken plugin", "broken plugins"),
            (len(self.skipped), "skipped plugin", "skipped plugins"),
            (len(self.waivers), "waiver of no rule", "waivers of no rule"),
        ):
            if count:
                parts.append(f"{count} {one if count == 1 else many}")
        parts.append((self.not_judged or _NOT_JUDGED) if self.report is None else self.report.summary())
        return f"{self.name}: {'; '.join(parts)}"

    def to_json(self, *, strict: bool = False) -> dict[str, Any]:
        """Plain data with the same content as :meth:`text`, rules that hold included."""
        return {
            "name": self.name,
            "exit_code": int(self.exit_code(strict=strict)),
            "summary": self.summary(),
            "config_faults": [fault_json(fault) for fault in self.config_faults],
            "plugin_faults": [fault_json(fault) for fault in self.plugin_faults],
            "skipped_plugins": [fault_json(fault) for fault in self.skipped],
            "unknown_waivers": [waiver.to_json() for waiver in self.waivers],
            "rules": None if self.report is None else self.report.to_json(),
        }


def fault_text(label: str, fault: KVFerryError) -> str:
    """One fault in the layout of the rules."""
    lines = [f"{label} {fault.where}: {fault.what}" if fault.where else f"{label} {fault.what}"]
    lines += [f"  why      {fault.why}"] if fault.why else []
    lines += [f"  fix      {fault.remedy}"] if fault.remedy else []
    return "\n".join(lines)


def fault_json(fault: KVFerryError) -> dict[str, str]:
    """One fault as plain data."""
    return {
        "kind": fault.kind.value,
        "what": fault.what,
        "where": fault.where,
        "why": fault.why,
        "fix": fault.remedy,
    }
