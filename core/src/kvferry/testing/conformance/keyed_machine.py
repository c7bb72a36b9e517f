"""The law that a model stands for: any order of calls gives what a dictionary would give."""

from __future__ import annotations

import contextlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry.api import DeleteStatus, ReadStatus, WriteStatus
from kvferry.testing.conformance.driver import Driver, digest
from kvferry.testing.conformance.keyed_subject import Chunk, KeyedSubject, Workbench

_NUMBERS = st.integers(0, 7)
_BATCHES = st.lists(st.tuples(_NUMBERS, st.integers(1, 3000), st.integers(0, 3)), min_size=1, max_size=5)


class ModelLaws(KeyedSubject, kit=True):
    """Random sequences of calls against a dictionary."""

    def test_any_sequence_of_calls_acts_like_a_dictionary(self, bench: Workbench) -> None:
        """Writing, reading, deleting and restarting in any order gives what a dictionary gives."""

        class OverThisStore(_Machine):
            def __init__(self) -> None:
                super().__init__(bench)

        run_state_machine_as_test(
            OverThisStore,
            settings=settings(
                max_examples=12,
                stateful_step_count=20,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


class _Machine(RuleBasedStateMachine):
    """Each example has a namespace of its own in the same store, and empties it at the end."""

    def __init__(self, bench: Workbench) -> None:
        super().__init__()
        self.bench = Workbench(
            bench.new_backend,
            bench.claims,
            bench.capacity,
            bench.patience,
            namespace=digest(bench.namespace, len(bench.drivers)),
        )
        self.driver: Driver = self.bench.open()
        bench.drivers.append(self.driver)
        self.model: dict[int, Chunk] = {}

    @rule(batch=_BATCHES)
    def write(self, batch: list[tuple[int, int, int]]) -> None:
        chunks = [self.bench.chunk(number, size, edition) for number, size, edition in batch]
        results = self.driver.write(chunks)
        for (number, _, _), chunk, result in zip(batch, chunks, results, strict=True):
            expected = WriteStatus.EXISTS if number in self.model else WriteStatus.STORED
            assert result.status is expected, result
            self.model.setdefault(number, chunk)

    @rule(numbers=st.lists(_NUMBERS, min_size=1, max_size=6))
    def delete(self, numbers: list[int]) -> None:
        expected = []
        for number in numbers:
            there = self.model.pop(number, None) is not None
            expected.append(DeleteStatus.DELETED if there else DeleteStatus.ABSENT)
        assert self.driver.delete([self.bench.key(number) for number in numbers]) == expected

    @rule(number=_NUMBERS, wrong=st.integers(1, 3000))
    def read_with_a_wrong_span(self, number: int, wrong: int) -> None:
        chunk = self.model.get(number)
        if chunk is None or chunk[0].size != wrong:
            found = self.driver.read_one(self.bench.key(number), wrong)
            assert found.status is not ReadStatus.FOUND

    @precondition(lambda self: self.bench.outlives)
    @rule()
    def restart(self) -> None:
        self.driver.close()
        self.driver = self.bench.open()
        if "persistent" in self.bench.claims:
            mine = {h.key: h for h in self.driver.recovered if h.key.namespace == self.bench.namespace}
            assert mine == {header.key: header for header, _ in self.model.values()}

    @invariant()
    def reads_what_the_model_holds(self) -> None:
        there = list(self.model.values())
        self.driver.expect(there)
        absent = [number for number in range(8) if number not in self.model]
        self.driver.expect_missing([(self.bench.key(number), 64) for number in absent])

    def teardown(self) -> None:
        with contextlib.suppress(Exception):  # a broken backend has been told of already
            self.driver.delete([self.bench.key(number) for number in range(8)])
        self.bench.close_all()
