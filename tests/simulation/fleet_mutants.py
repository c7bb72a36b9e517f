"""Small mistakes in what instances lend and borrow, each of which the simulation of a fleet must catch.

``python -m tests.simulation.fleet_mutants``, as ``tests.simulation.mutants`` in all else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.simulation import mutants
from tests.simulation.mutants import Mutant

PROGRAM = "tests.simulation.fleet_runs"
FLEET_MUTANTS = (
    Mutant(
        "nothing is taken off a lease for clocks that differ",
        "control/loans.py",
        "return self.deadline - self.peer.settings.guard_seconds",
        "return self.deadline",
    ),
    Mutant(
        "a lease is counted from when its grant came",
        "control/borrowing.py",
        "            quest.asked_at + answer.seconds,\n            answer.seconds,\n",
        "            now + answer.seconds,\n            answer.seconds,\n",
    ),
    Mutant(
        "a renewal counts as granted once it is asked for",
        "control/borrowing.py",
        "                loan.asked_at = now\n",
        "                loan.asked_at = now\n                loan.deadline = now + loan.lasts\n",
    ),
    Mutant(
        "a grant that was renewed ends at its first time",
        "control/serving.py",
        "            if lent.deadline > now:\n                heapq.heappush",
        "            if lent.deadline > now + 1e9:\n                heapq.heappush",
    ),
    Mutant(
        "a peer is told that all is read while something is read",
        "control/rises.py",
        "if rise.waits_to_send or rise.under_way or rise.id not in self._open:",
        "if rise.waits_to_send or rise.id not in self._open:",
    ),
    Mutant(
        "one done ends all that a peer was lent",
        "control/serving.py",
        '            self._end(known, number)\n            self.counts["done"] += 1\n',
        "            for each in list(known.open):\n"
        "                self._end(known, each)\n"
        '            self.counts["done"] += 1\n',
    ),
    Mutant(
        "a question that no peer answers is never given up",
        "control/borrowing.py",
        "self._quests.values() if each.deadline <= now]:",
        "self._quests.values() if each.deadline <= now and each.asked is None]:",
    ),
    Mutant(
        "one rank's read stands for all",
        "runtime/orders_of_all.py",
        "        if order.waiting:\n            return None\n",
        "",
    ),
    Mutant(
        "workers are not told of a peer that is given up",
        "control/borrowing.py",
        "            self.orders.append(ForgetOrder(peer.id.instance, peer.id.epoch))\n",
        "            pass\n",
    ),
    Mutant(
        "what could not be staged is lent",
        "control/staging.py",
        "good = 0 if copy.called_off else min(result.faults, default=len(copy.slots))",
        "good = 0 if copy.called_off else len(copy.slots)",
    ),
    Mutant(
        "slots of the staging are free once nobody wants what is copied into them",
        "control/staging.py",
        "        self._copies[order].called_off = True\n",
        "        self._copies[order].called_off = True\n"
        "        self.give(self._copies[order].slots)\n"
        "        self._copies[order].slots = ()\n",
    ),
    Mutant(
        "slots of the staging are never given back",
        "control/serving.py",
        "            self._stagings.give(lent.slots)\n",
        "            pass\n",
    ),
    Mutant(
        "a loan ends when it is taken",
        "control/borrowing.py",
        "        return self._kept.pop(request, None)\n",
        "        loan = self._kept.pop(request, None)\n"
        "        if loan is not None:\n            self.release(loan)\n        return loan\n",
    ),
    Mutant(
        "what could not be read is found",
        "control/consignment.py",
        "[item for item, place in places.items() if place not in faults]",
        "list(places)",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """As :func:`tests.simulation.mutants.main`."""
    return mutants.main(arguments, FLEET_MUTANTS, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
