"""pytest plugin: every test gives back what it took, and conformance suites report their laws.

Enable it with ``-p kvferry.testing.plugin``, on the command line or in ``addopts``; it is never loaded
by itself. A test that must leave something says so::

    @pytest.mark.may_leave("threads", reason="the library keeps a pool for the whole process")
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.testing.leaks import KINDS, LeakGuard

# Before any suite is imported, or a law that fails in an author's run would not show the values.
pytest.register_assert_rewrite("kvferry.testing.conformance")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"may_leave(*kinds, reason): what a test may leave behind, of {', '.join(KINDS)}",
    )
    from kvferry.testing.conformance.report import LawBook  # rewritten, because imported only now

    config.pluginmanager.register(LawBook(), "kvferry-laws")


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest) -> Iterator[LeakGuard]:
    """Fails the test that leaves threads, descriptors, shared memory, leases or slots behind.

    Fixtures of a wider scope are set up before it, so what they hold is not the test's.
    """
    kinds = set(KINDS)
    for mark in request.node.iter_markers("may_leave"):
        unknown = set(mark.args) - set(KINDS)
        if unknown or not mark.kwargs.get("reason"):
            pytest.fail(f"may_leave takes kinds of {', '.join(KINDS)} and a reason", pytrace=False)
        kinds -= set(mark.args)
    guard = LeakGuard(kinds)
    yield guard
    left = guard.leaks()
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)
