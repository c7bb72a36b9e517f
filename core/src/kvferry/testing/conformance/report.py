"""Which laws held: gathered while the tests run, told at the end."""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterator

import pytest
from attrs import define, field

from kvferry.testing.conformance.base import Conformance, unclaimed_key

PROPERTY = "kvferry_law"
"""Name of the user property by which a test's report carries what became of its law."""


class LawStatus(enum.Enum):
    """What became of a law. Of several runs of one law, the status that comes first here counts."""

    FAILED = "failed"
    NOT_RUN = "not run"
    """Deselected, or the run ended before."""
    SKIPPED = "skipped"
    """For a reason that is not a missing claim."""
    WAIVED = "waived"
    NOT_CLAIMED = "not claimed"
    PASSED = "passed"


_WORST_FIRST = list(LawStatus)


@define
class SuiteTally:
    """The laws of one author's class."""

    name: str
    suites: str
    laws: dict[str, LawStatus]
    details: dict[str, str] = field(factory=dict)
    items: dict[str, LawStatus] = field(factory=dict)
    """By node id; a law that runs over several parameters has several."""
    law_of: dict[str, str] = field(factory=dict)

    def expect(self, node: str, law: str) -> None:
        self.law_of[node] = law
        self.items.setdefault(node, LawStatus.NOT_RUN)

    def note(self, node: str, law: str, status: LawStatus, detail: str) -> None:
        before = self.items.get(node, LawStatus.NOT_RUN)
        if before is LawStatus.NOT_RUN or _WORST_FIRST.index(status) < _WORST_FIRST.index(before):
            self.items[node] = status
        self.law_of[node] = law
        if detail:
            self.details[law] = detail

    def statuses(self) -> dict[str, LawStatus]:
        """Status by law."""
        found = dict(self.laws)
        for node, status in self.items.items():
            law = self.law_of[node]
            known = [other for name, other in self.items.items() if self.law_of[name] == law]
            found[law] = min(known, key=_WORST_FIRST.index) if known else status
        return found

    def lines(self) -> Iterator[str]:
        """The summary in words."""
        statuses = self.statuses()
        counts = [(status, [law for law, own in statuses.items() if own is status]) for status in LawStatus]
        told = [f"{len(laws)} {status.value}" for status, laws in reversed(counts) if laws]
        yield f"{self.name} ({self.suites}): {len(statuses)} laws: {', '.join(told)}"
        for status, laws in counts:
            if status is LawStatus.NOT_CLAIMED:
                for ability in sorted({self.details.get(law, "") for law in laws}):
                    named = [law for law in laws if self.details.get(law, "") == ability]
                    yield f"  not claimed  {ability}: {', '.join(named)}"
            elif status is LawStatus.WAIVED:
                yield from (f"  waived       {law}: {self.details.get(law, '')}" for law in laws)
            elif status in (LawStatus.FAILED, LawStatus.SKIPPED):
                yield from (f"  {status.value:<12} {law}" for law in laws)


class LawBook:
    """pytest hooks that apply waivers and count laws. One per run; see :mod:`kvferry.testing.plugin`.

    Results travel in the reports of the tests, so they also arrive from worker processes; a process
    that collects nothing itself knows of those laws only that ran.
    """

    def __init__(self) -> None:
        self._tallies: dict[str, SuiteTally] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        found = _law_of(item)
        if found is not None:
            cls, law = found
            self._tally(_suite_id(item), cls).expect(item.nodeid, law)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        found = _law_of(item)
        if found is not None:
            cls, law = found
            reason = cls.waivers.get(law, "")
            if reason and call.when == "call":
                _apply_waiver(report, law, reason)
            status, detail = _status(item, report, reason)
            if status is not None:
                value = [_suite_id(item), law, status.value, detail]
                report.user_properties.append((PROPERTY, value))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY and isinstance(value, list):
                suite, law, status, detail = value
                self._tally(suite, None).note(report.nodeid, law, LawStatus(status), detail)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = self.lines()
        if lines:
            terminalreporter.section("kvferry conformance")
            for line in lines:
                terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        """The report: one paragraph per class of an author."""
        return [line for tally in self._tallies.values() for line in tally.lines()]

    def _tally(self, suite: str, cls: type[Conformance] | None) -> SuiteTally:
        if suite not in self._tallies:
            laws = dict.fromkeys(() if cls is None else cls.laws(), LawStatus.NOT_RUN)
            self._tallies[suite] = SuiteTally(suite, _suite_names(cls), laws)
        return self._tallies[suite]


def _law_of(item: pytest.Item) -> tuple[type[Conformance], str] | None:
    if not isinstance(item, pytest.Function):
        return None
    cls, name = item.cls, item.originalname
    if not (isinstance(cls, type) and issubclass(cls, Conformance)):
        return None
    return (cls, name) if name in cls.laws() else None


def _suite_names(cls: type[Conformance] | None) -> str:
    """The suites that an author named; not those that they are made of."""
    suites = [] if cls is None else cls.suites()
    named = [
        one for one in suites if not any(one is not other and issubclass(other, one) for other in suites)
    ]
    return " + ".join(suite.__name__ for suite in named) or Conformance.__name__


def _suite_id(item: pytest.Item) -> str:
    return item.nodeid if item.parent is None else item.parent.nodeid


def _apply_waiver(report: pytest.TestReport, law: str, reason: str) -> None:
    """A waived law is an expected failure, strictly: passing is the failure."""
    if report.failed:
        report.outcome = "skipped"
        report.wasxfail = f"waived: {reason}"
    elif report.passed:
        report.outcome = "failed"
        report.longrepr = f"{law} is waived ({reason}) and holds: remove the waiver"


def _status(item: pytest.Item, report: pytest.TestReport, waiver: str) -> tuple[LawStatus | None, str]:
    if report.failed:
        return LawStatus.FAILED, ""
    if report.skipped:
        if hasattr(report, "wasxfail"):
            return LawStatus.WAIVED, waiver or str(report.wasxfail)
        missing = item.stash.get(unclaimed_key, ())
        return (LawStatus.NOT_CLAIMED, ", ".join(missing)) if missing else (LawStatus.SKIPPED, "")
    return (LawStatus.PASSED, "") if report.when == "call" else (None, "")
