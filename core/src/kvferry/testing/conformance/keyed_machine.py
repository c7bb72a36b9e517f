"""The law that a model stands for: any order of calls gives what a dictionary would give."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from attrs import evolve
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry.api import DeleteStatus, WriteStatus
from kvferry.testing.conformance.driver import Driver, digest, expect_status
from kvferry.testing.conformance.keyed_subject import Chunk, KeyedSubject, Workbench

_NUMBERS = st.integers(0, 7)
_BATCHES = st.lists(st.tuples(_NUMBERS, st.integers(1, 3000), st.integers(0, 3)), min_size=1, max_size=5)
_SHORT_ONES_FIRST = ((8, 5), (10, 20))
"""Numbers of sequences and of calls in each: most mistakes show in a few calls, and read better so."""


class ModelLaws(KeyedSubject, kit=True):
    """Random sequences of calls against a dictionary."""

    def test_any_sequence_of_calls_acts_like_a_dictionary(self, bench: Workbench) -> None:
        """Writing, reading, deleting and restarting in any order gives what a dictionary gives."""
        failures: list[Exception] = []

        class OverThisStore(_Machine):
            def __init__(self) -> None:
                super().__init__(bench, failures)

        try:
            for examples, calls in _SHORT_ONES_FIRST:
                run_state_machine_as_test(
                    OverThisStore,
                    settings=settings(
                        max_examples=examples,
                        stateful_step_count=calls,
                        # Finding shorter failing sequences would take minutes over a real store.
                        phases=(Phase.generate,),
                        report_multiple_bugs=False,
                        deadline=None,
                        database=None,
                        suppress_health_check=list(HealthCheck),
                    ),
                )
        except Flaky:
            if not failures:
                raise
            failures[0].add_note(
                "The same calls again went otherwise, so the first time left something behind: a lock, a "
                "descriptor or a record."
            )
            raise failures[0] from None


_Step = Callable[..., None]


def _noted(step: _Step) -> _Step:
    """Remembers what a step raises, before Hypothesis tries to repeat it."""

    @functools.wraps(step)
    def run(self: _Machine, *arguments: Any, **drawn: Any) -> None:
        try:
            step(self, *arguments, **drawn)
        except Exception as error:
            self.failures.append(error)
            raise

    return run


class _Machine(RuleBasedStateMachine):
    """Each example has a namespace of its own in the same store, and empties it at the end."""

    def __init__(self, bench: Workbench, failures: list[Exception]) -> None:
        super().__init__()
        self.failures = failures
        self.bench = evolve(bench, namespace=digest(bench.namespace, len(bench.drivers)), drivers=[])
        self.model: dict[int, Chunk] = {}
        self._begin()
        bench.drivers.append(self.driver)

    @_noted
    def _begin(self) -> None:
        self.driver: Driver = self.bench.open()

    @rule(batch=_BATCHES)
    @_noted
    def write(self, batch: list[tuple[int, int, int]]) -> None:
        chunks = [self.bench.chunk(number, size, edition) for number, size, edition in batch]
        results = self.driver.write(chunks)
        for (number, _, _), chunk, result in zip(batch, chunks, results, strict=True):
            expected = WriteStatus.EXISTS if number in self.model else WriteStatus.STORED
            expect_status(result, expected)
            self.model.setdefault(number, chunk)

    @rule(numbers=st.lists(_NUMBERS, min_size=1, max_size=6))
    @_noted
    def delete(self, numbers: list[int]) -> None:
        expected = []
        for number in numbers:
            there = self.model.pop(number, None) is not None
            expected.append(DeleteStatus.DELETED if there else DeleteStatus.ABSENT)
        assert self.driver.delete([self.bench.key(number) for number in numbers]) == expected

    @rule(number=_NUMBERS, wrong=st.integers(1, 3000))
    @_noted
    def read_with_a_wrong_span(self, number: int, wrong: int) -> None:
        chunk = self.model.get(number)
        if chunk is None or chunk[0].size != wrong:
            self.driver.expect_no_data(self.bench.key(number), wrong)

    @precondition(lambda self: self.bench.outlives)
    @rule()
    @_noted
    def restart(self) -> None:
        self.driver = self.bench.reopen(self.driver)
        if "persistent" in self.bench.claims:
            mine = {h.key: h for h in self.driver.recovered if h.key.namespace == self.bench.namespace}
            assert mine == {header.key: header for header, _ in self.model.values()}

    @invariant()
    @_noted
    def reads_what_the_model_holds(self) -> None:
        there = list(self.model.values())
        self.driver.expect(there)
        absent = [number for number in range(8) if number not in self.model]
        self.driver.expect_missing([(self.bench.key(number), 64) for number in absent])

    def teardown(self) -> None:
        with contextlib.suppress(Exception):  # a broken backend has been told of already
            self.driver.delete([self.bench.key(number) for number in range(8)])
        self.bench.close_all()
