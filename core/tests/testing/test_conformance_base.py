"""The kit's own promises: laws stand, waivers are strict, and the report tells what became of each."""

from __future__ import annotations

from textwrap import dedent

import pytest

from kvferry.api import KVFerryError
from kvferry.testing.conformance import Conformance, needs

pytest_plugins = ("pytester",)

SUITE = """
    import pytest
    from kvferry.testing.conformance import Conformance, needs

    class DoorConformance(Conformance, kit=True):
        @pytest.fixture
        def claims(self, door):
            return frozenset(name for name, claimed in door.items() if claimed is True)

        def test_opens(self, door):
            "A door opens."
            assert door["state"] == "open"

        @needs("lock")
        def test_locks(self, door):
            "A door with a lock locks."
            assert door["lock"]

        def test_closes(self, door):
            "A door closes."
            if door["state"] == "broken":
                raise OSError("jammed")
"""


class DoorConformance(Conformance, kit=True):
    def test_opens(self) -> None:
        """A door opens."""

    @needs("lock")
    def test_locks(self) -> None:
        """A door with a lock locks."""


class SlidingDoorConformance(DoorConformance, kit=True):
    def test_slides(self) -> None:
        """A sliding door slides."""


def run(pytester: pytest.Pytester, author: str, *options: str) -> tuple[list[str], int]:
    """The conformance report of an author's test module, and the exit code."""
    pytester.makepyfile(test_author=dedent(SUITE) + dedent(author))
    result = pytester.runpytest_inprocess("-p", "kvferry.testing.plugin", *options)
    lines = result.outlines
    begin = next((at for at, line in enumerate(lines) if "kvferry conformance" in line), len(lines))
    report = []
    for line in lines[begin + 1 :]:
        if line.startswith("="):
            break
        report += [line] if line else []
    return report, int(result.ret)


def author(body: str, state: str = "open", lock: str = "True") -> str:
    return f"""
    class TestMine(DoorConformance):
        {body}
        @pytest.fixture
        def door(self):
            return {{"state": "{state}", "lock": {lock}}}
    """


def test_a_sound_door_passes_every_law(pytester: pytest.Pytester) -> None:
    report, code = run(pytester, author(""))
    assert report == ["test_author.py::TestMine (DoorConformance): 3 laws: 3 passed"]
    assert code == 0


def test_a_missing_claim_is_told_by_name(pytester: pytest.Pytester) -> None:
    report, code = run(pytester, author("", lock="None"))
    assert report == [
        "test_author.py::TestMine (DoorConformance): 3 laws: 2 passed, 1 not claimed",
        "  not claimed  lock: test_locks",
    ]
    assert code == 0


def test_a_broken_law_fails_the_run_and_shows_the_values(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_author=dedent(SUITE) + dedent(author("", state="shut")))
    result = pytester.runpytest_inprocess("-p", "kvferry.testing.plugin")
    result.stdout.fnmatch_lines(
        ["*assert 'shut' == 'open'*", "*3 laws: 2 passed, 1 failed", "*failed*test_opens"]
    )
    assert result.ret == 1


def test_a_waived_law_runs_and_may_fail(pytester: pytest.Pytester) -> None:
    report, code = run(pytester, author('waivers = {"test_opens": "painted shut"}', state="shut"))
    assert report == [
        "test_author.py::TestMine (DoorConformance): 3 laws: 2 passed, 1 waived",
        "  waived       test_opens: painted shut",
    ]
    assert code == 0


def test_a_waived_law_may_end_in_any_exception(pytester: pytest.Pytester) -> None:
    waivers = 'waivers = {"test_opens": "broken", "test_closes": "broken"}'
    report, code = run(pytester, author(waivers, state="broken"))
    assert report[0].endswith("3 laws: 1 passed, 2 waived")
    assert code == 0


def test_a_waiver_that_is_not_needed_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_author=dedent(SUITE) + dedent(author('waivers = {"test_opens": "old"}')))
    result = pytester.runpytest_inprocess("-p", "kvferry.testing.plugin")
    result.stdout.fnmatch_lines(
        ["test_opens is waived (old) and holds: remove the waiver", "*failed*test_opens"]
    )
    assert result.ret == 1


def test_a_waiver_covers_the_law_and_not_the_author_s_fixtures(pytester: pytest.Pytester) -> None:
    text = author('waivers = {"test_opens": "shut"}').replace(
        "return", "raise RuntimeError('wet paint')\n" + " " * 12 + "return"
    )
    report, code = run(pytester, text)
    assert report[0].endswith("3 laws: 3 failed")
    assert code == 1


def test_what_a_selection_left_out_is_counted(pytester: pytest.Pytester) -> None:
    report, code = run(pytester, author(""), "-k", "opens or closes")
    assert report == ["test_author.py::TestMine (DoorConformance): 3 laws: 2 passed, 1 not run"]
    assert code == 0


def test_one_node_alone_knows_the_other_laws(pytester: pytest.Pytester) -> None:
    report, _ = run(pytester, author(""), "test_author.py::TestMine::test_opens")
    assert report == ["test_author.py::TestMine (DoorConformance): 3 laws: 1 passed, 2 not run"]


def test_a_skip_of_the_author_s_own_is_no_pass(pytester: pytest.Pytester) -> None:
    report, _ = run(pytester, author('pytestmark = pytest.mark.skip(reason="later")'))
    assert report[0].endswith("3 laws: 3 skipped")
    assert "  skipped      test_opens" in report


@pytest.mark.parametrize("states", [["open", "shut"], ["shut", "open"]])
def test_of_several_runs_of_a_law_the_worst_counts(pytester: pytest.Pytester, states: list[str]) -> None:
    text = f"""
    class TestMine(DoorConformance):
        @pytest.fixture(params={states})
        def door(self, request):
            return {{"state": request.param, "lock": True}}
    """
    report, code = run(pytester, text)
    assert report[0].endswith("3 laws: 2 passed, 1 failed")
    assert code == 1
    report, code = run(pytester, text, "-k", "open]")
    assert report[0].endswith("3 laws: 3 not run"), "half of the runs are no proof"


def test_tests_of_the_author_s_own_are_welcome_and_no_laws(pytester: pytest.Pytester) -> None:
    body = "def test_handle(self, door): assert door"
    report, code = run(pytester, author(body))
    assert report == ["test_author.py::TestMine (DoorConformance): 3 laws: 3 passed"]
    assert code == 0


def test_a_run_without_suites_has_no_report(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_inprocess("-p", "kvferry.testing.plugin")
    assert "conformance" not in result.stdout.str()


def test_without_the_plugin_no_law_passes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_author=dedent(SUITE) + dedent(author("")))
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=3)
    result.stdout.fnmatch_lines(["*need the option  -p kvferry.testing.plugin*"])


def test_overriding_a_law_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(KVFerryError, match="overrides test_opens, a law of DoorConformance") as caught:

        class Mine(SlidingDoorConformance):
            def test_opens(self) -> None:
                pass

    assert "waivers" in caught.value.remedy


def test_a_law_cannot_be_set_to_nothing_either() -> None:
    with pytest.raises(KVFerryError, match="overrides test_slides"):

        class Mine(SlidingDoorConformance):
            test_slides = None


def test_a_mixin_cannot_override_a_law() -> None:
    class Mixin:
        def test_opens(self) -> None:
            pass

    with pytest.raises(KVFerryError, match="Mixin overrides test_opens"):

        class Mine(Mixin, DoorConformance):
            pass


def test_the_gate_that_skips_unclaimed_laws_cannot_be_overridden() -> None:
    with pytest.raises(KVFerryError, match="overrides _law_gate"):

        class Mine(DoorConformance):
            def _law_gate(self) -> None:  # type: ignore[override]
                pass


def test_an_author_cannot_claim_less_than_the_spec_does() -> None:
    with pytest.raises(KVFerryError, match="overrides claims"):

        class Mine(DoorConformance):
            @pytest.fixture
            def claims(self) -> frozenset[str]:
                return frozenset()


@pytest.mark.parametrize(
    ("waivers", "complaint"),
    [
        ({"test_opens": ""}, "the waiver of test_opens has no reason"),
        ({"test_opens": "  "}, "the waiver of test_opens has no reason"),
        ({"test_opens": True}, "the waiver of test_opens has no reason"),
        ({"test_open": "typing"}, "the waiver 'test_open' names no law"),
        (["test_opens"], "waivers is not a mapping"),
    ],
)
def test_a_waiver_needs_a_law_and_a_reason(waivers: object, complaint: str) -> None:
    with pytest.raises(KVFerryError, match=complaint):
        type("Mine", (DoorConformance,), {"waivers": waivers})


def test_a_law_says_in_words_what_it_demands() -> None:
    with pytest.raises(KVFerryError, match="test_silent does not say in words"):

        class Silent(Conformance, kit=True):
            def test_silent(self) -> None:
                pass


def test_laws_come_from_every_suite_in_order() -> None:
    class Mine(SlidingDoorConformance):
        pass

    assert list(Mine.laws()) == ["test_opens", "test_locks", "test_slides"]
