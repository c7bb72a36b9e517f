"""Small mistakes in the control plane, each of which the simulation must catch.

``make mutants`` (``python -m tests.simulation.mutants``) makes each mistake in a copy of the package, lets
the simulation run over the copy in a process of its own, and shows after how many events which check
caught it. ``--only NAME`` (may be repeated) runs some of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attrs import frozen
from rich.console import Console
from rich.table import Table

import kvferry

PACKAGE = Path(kvferry.__file__).parent
REPOSITORY = Path(__file__).parents[2]
MOST_EVENTS = 200_000
"""Within so many events each mutant is caught."""
MOST_CPU_SECONDS = 120
"""Ten times what so many events take: a mutant that needs more never ends."""
PROGRAM = "tests.simulation"


@frozen
class Mutant:
    """Replaces ``old``, which must occur exactly once in ``file``, with ``new``."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "an ended load keeps its leases",
        "control/matching.py",
        "        self.leases.close(lease)\n        self.residency.let_go(lease.rows)",
        "        self.leases.close(lease)",
    ),
    Mutant(
        "chunks under a lease are evicted",
        "control/residency.py",
        "if self.entries.state.view[row] != State.VISIBLE or self.leases.view[row] or pins[row]:",
        "if self.entries.state.view[row] != State.VISIBLE or pins[row]:",
    ),
    Mutant(
        "heads go before tails",
        "control/residency.py",
        "            if self.entries.has_successors(row):\n                return Claim.HAS_SUCCESSORS\n",
        "",
    ),
    Mutant(
        "failed writes are committed",
        "runtime/scheduler.py",
        "good = [chunk for chunk in flight.granted if chunk.slot not in ended.failed_slots]",
        "good = list(flight.granted)",
    ),
    Mutant(
        "chunks are committed before they are written",
        "control/manager.py",
        "return self._writers.reserve(owner, salt, writes, now, model, end, content)",
        "answer = self._writers.reserve(owner, salt, writes, now, model, end, content)\n"
        "        for item in answer.items:\n"
        "            if item.slot >= 0:\n"
        "                row = int(np.flatnonzero((self._residency.entries.state.array == State.RESERVED)\n"
        "                    & (self._residency.tier.slot.array == item.slot))[0])\n"
        "                self._residency.written(row)\n"
        "        return answer",
    ),
    Mutant(
        "one rank's result stands for all",
        "runtime/in_flight.py",
        "        if transfer.waiting:\n            return None\n",
        "",
    ),
    Mutant(
        "quarantine is skipped",
        "control/residency.py",
        "if state == State.WRITTEN or (written_by_nobody and row == root):",
        "if True:",
    ),
    Mutant(
        "a late result is taken after the deadline",
        "control/writing.py",
        "        self.leases.disown(lease)\n        self.residency.cut(lease.rows.values())",
        "        self.leases.disown(lease)",
    ),
    Mutant(
        "a slot is freed twice",
        "control/residency.py",
        "        self.tier.pool.give(self.tier.slot.view[row])\n",
        "        self.tier.pool.give(self.tier.slot.view[row])\n"
        "        if self.count[State.FREE] == 7:\n"
        "            self.tier.pool.give(self.tier.slot.view[row])\n",
    ),
    Mutant(
        "the chunk before is not asked for",
        "control/residency.py",
        "complete = parent == ROOT or self.entries.state.view[parent] == State.VISIBLE",
        "complete = True",
    ),
    Mutant(
        "retiring chunks are freed too early",
        "control/residency.py",
        "                    if self.leases.view[row]:\n"
        "                        self._move(row, State.RETIRING)",
        "                    if self.leases.view[row] > 1:\n"
        "                        self._move(row, State.RETIRING)",
    ),
    Mutant(
        "loads in flight expire",
        "control/leases.py",
        "return not (lease.in_flight if isinstance(lease, ReadLease) else lease.given_up)",
        "return isinstance(lease, ReadLease) or not lease.given_up",
    ),
    Mutant(
        "aliases of evicted chunks stay",
        "control/residency.py",
        "        self.entries.partials.hide(row)\n",
        "        if not self.entries.is_full(row):\n            self.entries.partials.hide(row)\n",
    ),
    Mutant(
        "what is behind a dropped chunk stays",
        "control/residency.py",
        "            branch = self.entries.behind(root)\n",
        "            branch = [root]\n",
    ),
    Mutant(
        "an ended lease can be renewed",
        "control/leases.py",
        "        if lease is None:\n"
        "            return self._why_not(number)\n"
        "        if isinstance(lease, WriteLease)",
        "        if lease is None:\n"
        "            return LeaseOutcome.OK\n"
        "        if isinstance(lease, WriteLease)",
    ),
    Mutant(
        "a reservation that was given up can be renewed",
        "control/leases.py",
        "if isinstance(lease, WriteLease) and lease.given_up:\n"
        "            return LeaseOutcome.LATE\n"
        "        #",
        "if False:\n            return LeaseOutcome.LATE\n        #",
    ),
    Mutant(
        "writes beyond their owner's end are given up",
        "control/manager.py",
        "elif isinstance(lease, WriteLease) and not keep_writes:",
        "elif isinstance(lease, WriteLease):",
    ),
    Mutant(
        "loads of lost workers go on for ever",
        "control/manager.py",
        "            elif lease.in_flight:\n"
        "                self._readers.end(lease)\n"
        "                reads += 1",
        "            elif lease.in_flight:\n                reads += 1",
    ),
    Mutant(
        "leased slots are counted twice",
        "control/residency.py",
        "self.leased += len(rows) - int(np.count_nonzero(before))",
        "self.leased += len(rows)",
    ),
    Mutant(
        "a load under way is no reason to wait",
        "control/matching.py",
        "        if lease.in_flight:\n            return LeaseOutcome.DEFERRED\n",
        "",
    ),
    Mutant(
        "the end of an owner ends its loads",
        "control/manager.py",
        "if isinstance(lease, ReadLease) and not lease.in_flight:",
        "if isinstance(lease, ReadLease):",
    ),
    Mutant(
        "a batch evicts what it stands on",
        "control/writing.py",
        "        residency.hold(protected)\n",
        "        protected = protected[:0]\n",
    ),
    Mutant(
        "writes under way survive a clear",
        "control/clearing.py",
        "        chosen = (states >= State.RESERVED) & (states <= State.VISIBLE)\n",
        "        chosen = states == State.VISIBLE\n",
    ),
    Mutant(
        "a request forgets to give its match back",
        "runtime/loads.py",
        "        with self._lock:\n            self._manager.release(state.lease)\n",
        "",
    ),
    Mutant(
        "an ended request's matches stay",
        "runtime/scheduler.py",
        "        self._loads.give_back(state)\n"
        "        self._loads.drop_loan(state)\n"
        "        with self._lock:\n"
        "            self._manager.release_owner(request_id, keep_writes=True)\n",
        "",
    ),
    Mutant(
        "a preempted request's saves are not waited for",
        "runtime/scheduler.py",
        "        if state.saves:\n            self._flush.append(request_id)\n",
        "",
    ),
    Mutant(
        "an ended request's blocks are given up at once",
        "runtime/scheduler.py",
        "        self._ended.append(request_id)\n        return True",
        "        return False",
    ),
    Mutant(
        "a result of an earlier life is believed",
        "runtime/roster.py",
        "if worker is None or worker.epoch != message.epoch:",
        "if worker is None:",
    ),
    Mutant(
        "a whole prompt is found",
        "runtime/scheduler.py",
        "limit = (tokens - 1) // self._grain.block * self._grain.block",
        "limit = tokens // self._grain.block * self._grain.block",
    ),
    Mutant(
        "what old weights computed is stored",
        "runtime/scheduler.py",
        "state.outdated = bool(state.blocks) or state.load is LoadState.LOADING",
        "state.outdated = False",
    ),
    Mutant(
        "saves of a request that was preempted and then ended are not waited for",
        "runtime/scheduler.py",
        "        if not any(blocks):\n",
        "        if False:\n",
    ),
    Mutant(
        "pinned chunks are evicted",
        "control/residency.py",
        "if self.entries.state.view[row] != State.VISIBLE or self.leases.view[row] or pins[row]:",
        "if self.entries.state.view[row] != State.VISIBLE or self.leases.view[row]:",
    ),
    Mutant(
        "chunks are found after their time",
        "control/matching.py",
        "            rows = deadlines.living(rows, now)\n",
        "            pass\n",
    ),
    Mutant(
        "nobody is told of what went",
        "control/events.py",
        "            self._append(RemovedFact(digest))\n",
        "            pass\n",
    ),
    Mutant(
        "an owner gets one chunk beyond its quota",
        "control/writing.py",
        "self._refuse(plan, salt, allowed - residency.entries.salts.count(salt))",
        "self._refuse(plan, salt, 1 + allowed - residency.entries.salts.count(salt))",
    ),
    Mutant(
        "chunks on their way count for no quota",
        "control/writing.py",
        "        held = residency.entries.salts.count(salt)\n",
        "        mine = residency.entries.salt.array == residency.entries.salts.find(salt)\n"
        "        mine &= residency.entries.state.array == State.VISIBLE\n"
        "        held = int(mine.sum())\n",
    ),
    Mutant(
        "others make room for an owner's excess",
        "control/writing.py",
        "residency.evict(min(surplus, wanted + _CATCH_UP_CHUNKS), salt)",
        "residency.evict(min(surplus, wanted + _CATCH_UP_CHUNKS))",
    ),
    Mutant(
        "quotas are enforced beyond what they say",
        "control/clearing.py",
        "need = min(self._quotas.excess(self._owners[-1]), chunks)",
        "need = chunks if self._quotas.excess(self._owners[-1]) else 0",
    ),
    Mutant(
        "quotas are enforced for one owner in a slice",
        "control/clearing.py",
        "            self._owners.pop()\n",
        "            self._owners.clear()\n",
    ),
    Mutant(
        "chunks that are being deleted below are written meanwhile",
        "control/lower.py",
        "return coming or digest in self._leaving or digest in self._doomed or copying.freed(digest)",
        "return coming",
    ),
    Mutant(
        "copies down that failed are found",
        "control/lower.py",
        "store.complete_one(result.faults)",
        "store.complete_one({})",
    ),
    Mutant(
        "copies down end without an end of their leases",
        "control/lower.py",
        "        for lease in store.leases:\n            self._first.finish_load(lease)\n\n    def fetched(",
        "\n    def fetched(",
    ),
    Mutant(
        "more is copied down at once than may be",
        "control/lower.py",
        "free = self.settings.chunks_in_flight - self.storing",
        "free = self.settings.chunks_in_flight",
    ),
    Mutant(
        "what an index evicts stays in its store",
        "control/lower.py",
        "self._doomed.update(dict.fromkeys(self.index.copying.take_freed(DELETED_PER_ORDER)))",
        "self.index.copying.take_freed(DELETED_PER_ORDER)",
    ),
    Mutant(
        "deletions below that failed are forgotten",
        "control/lower.py",
        "        if again and self.usable:\n",
        "        if False:\n",
    ),
    Mutant(
        "deletions below never end",
        "control/lower.py",
        "        self._leaving.difference_update(digests)\n",
        "",
    ),
    Mutant(
        "copies down never end",
        "control/lower.py",
        "        self._writing.difference_update(chunk.digest for chunk in store.chunks)\n",
        "",
    ),
    Mutant(
        "what was fetched is counted as on its way for ever",
        "control/lower.py",
        "        self.fetching -= len(chunks)\n",
        "",
    ),
    Mutant(
        "what was cleared is found at the next opening",
        "control/lower.py",
        "        self._stale.add(salt, model)\n",
        "",
    ),
    Mutant(
        "chunks that did not rise are found",
        "control/rises.py",
        "fetch.complete_one(result.faults)",
        "fetch.complete_one({})",
    ),
    Mutant(
        "more is fetched at once than may be",
        "control/rises.py",
        "room = origin.settings.chunks_in_flight - origin.fetching",
        "room = origin.settings.chunks_in_flight",
    ),
    Mutant(
        "an ended rise keeps its leases below",
        "control/rises.py",
        "        for segment in rise.held:\n            segment.release()\n",
        "",
    ),
    Mutant(
        "what an aborted request waited for comes up",
        "control/rises.py",
        "                if not rise.waiters:\n                    self._cancel(rise)\n",
        "",
    ),
    Mutant(
        "a fetch of one rank stands for all",
        "runtime/orders_of_all.py",
        "        if order.waiting:\n            return None\n",
        "",
    ),
    Mutant(
        "chunks that only some ranks have are found",
        "runtime/lower_tiers.py",
        "common = set.intersection(*names) - spoilt",
        "common = set.union(*names) - spoilt",
    ),
    Mutant(
        "what is lent may be evicted",
        "control/copying.py",
        "for row in rows], held=False)",
        "for row in rows], held=True)",
    ),
    Mutant(
        "what is set aside never goes",
        "control/copying.py",
        "self._lent(owner, chosen, held=True)",
        "self._lent(owner, chosen, held=False)",
    ),
    Mutant(
        "chunks that are set aside are freed before they are copied",
        "control/hierarchy.py",
        "        tier.store([lent] if first is None else [first, lent], now)\n",
        "        tier.store([lent] if first is None else [first, lent], now)\n"
        "        self.first.finish_load(lent.lease)\n",
    ),
)


@frozen
class Outcome:
    """After how many events which check caught a mutant; ``check`` is empty where none did."""

    mutant: Mutant
    events: int
    check: str


def judge(
    mutant: Mutant, events: int = MOST_EVENTS, package: Path = PACKAGE, program: str = PROGRAM
) -> Outcome:
    """Run a simulation, the module ``program``, over a copy of the package that makes one mistake.

    Raises ``ValueError`` when the mistake cannot be made because the code is another one by now, and
    ``RuntimeError`` when the simulation did not run over the copy.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-mutant-") as folder:
        copy = Path(folder) / "kvferry"
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        mutate(copy, mutant)
        return _simulate(mutant, Path(folder), events, program)


def mutate(package: Path, mutant: Mutant) -> None:
    file = package / mutant.file
    text = file.read_text()
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"mutant {mutant.name!r}: its text occurs {count} times in {mutant.file}")
    file.write_text(text.replace(mutant.old, mutant.new))


def _simulate(mutant: Mutant, folder: Path, events: int, program: str) -> Outcome:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(REPOSITORY)))}
    command = [sys.executable, "-m", program, "--json", "--events", str(events)]
    command += ["--cpu-seconds", str(MOST_CPU_SECONDS)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == -signal.SIGXCPU:
        return Outcome(mutant, events, "a call that never ends")
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"mutant {mutant.name!r} could not be simulated:\n{done.stderr}")
    told = json.loads(done.stdout.splitlines()[-1])
    if not told["package"].startswith(str(folder)):
        raise RuntimeError(f"mutant {mutant.name!r}: the simulation ran over {told['package']}")
    return Outcome(mutant, told["events"], told["check"] or "")


def judge_all(
    mutants: Sequence[Mutant], events: int = MOST_EVENTS, program: str = PROGRAM
) -> Iterator[Outcome]:
    """In the order of ``mutants``; as many at a time as there are processors."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda mutant: judge(mutant, events, program=program), mutants)


def table(outcomes: Sequence[Outcome]) -> Table:
    shown = Table("mutant", "caught after", "by", title="What the simulation catches")
    for outcome in outcomes:
        after = f"{outcome.events:,} events" if outcome.check else f"[red]not in {outcome.events:,}[/]"
        shown.add_row(outcome.mutant.name, after, outcome.check)
    return shown


def main(
    arguments: Sequence[str] | None = None, mutants: Sequence[Mutant] = MUTANTS, program: str = PROGRAM
) -> int:
    """0 when every mutant was caught, and the simulation finds nothing where there is no mistake."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--only", action="append", choices=[m.name for m in mutants], metavar="NAME")
    parser.add_argument("--events", type=int, default=MOST_EVENTS)
    parsed = parser.parse_args(arguments)
    chosen = [mutant for mutant in mutants if not parsed.only or mutant.name in parsed.only]
    sound = Mutant("no mistake at all", "__init__.py", "", "")
    with tempfile.TemporaryDirectory(prefix="kvferry-mutant-") as folder:
        shutil.copytree(PACKAGE, Path(folder) / "kvferry", ignore=shutil.ignore_patterns("__pycache__"))
        control = _simulate(sound, Path(folder), parsed.events, program)
    console = Console()
    outcomes = []
    for outcome in judge_all(chosen, parsed.events, program):
        console.print(f"{outcome.mutant.name}: {outcome.check or 'not caught'}")
        outcomes.append(outcome)
    console.print(table(outcomes))
    if control.check:
        console.print(f"[red]caught without a mistake:[/] {control.check}")
    survivors = [outcome for outcome in outcomes if not outcome.check]
    return int(bool(survivors or control.check))


if __name__ == "__main__":
    sys.exit(main())
