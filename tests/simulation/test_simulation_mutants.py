"""The simulation can fail: a few of its mutants here, all of them with ``make mutants``."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from tests.simulation.mutants import MUTANTS, PACKAGE, Mutant, judge, judge_all, mutate

QUICK = (
    "chunks under a lease are evicted",
    "one rank's result stands for all",
    "quarantine is skipped",
    "heads go before tails",
    "an owner gets one chunk beyond its quota",
)


def named(name: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if mutant.name == name)


def test_mutants_are_caught() -> None:
    outcomes = list(judge_all([named(name) for name in QUICK], events=20_000))
    for outcome in outcomes:
        print(f"{outcome.mutant.name}: after {outcome.events:,} events by {outcome.check!r}")
    assert [outcome.mutant.name for outcome in outcomes if not outcome.check] == []


def test_what_is_no_mistake_is_not_caught() -> None:
    harmless = Mutant(
        "harmless", "control/slots.py", '"""Which slots of an arena are free."""', '"""Slots."""'
    )
    assert judge(harmless, events=2000).check == ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_code_still_holds_what_a_mutant_replaces(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} changed: mend the mutant {mutant.name!r}"
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")


def test_a_mutant_whose_text_is_gone_fails_loudly(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "residency.py").write_text("# something else\n")
    with pytest.raises(ValueError, match="occurs 0 times in control/residency"):
        mutate(tmp_path, attrs.evolve(MUTANTS[0], file="control/residency.py"))


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
