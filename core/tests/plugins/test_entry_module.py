"""What the import of an entry module costs, and that a refused one is forgotten."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from kvferry.plugins import PluginRequest, PluginState, load_plugins
from kvferry.plugins.entrymodule import (
    HEAVY_MODULES,
    WAIT_LIMIT_SECONDS,
    WORK_LIMIT_SECONDS,
    Clocks,
)
from kvferry.testing.fake_distributions import distributions_in, importable

from .conftest import GOOD, Zoo, row


def clock(step: float) -> Iterator[float]:
    """A time that goes on by ``step`` seconds between every second reading."""
    now = 0.0
    while True:
        yield now
        now += step
        yield now


def remarks(zoo: Zoo, work: float, passing: float) -> tuple[str, ...]:
    worked, passed = clock(work), clock(passing)
    clocks = Clocks(work=lambda: next(worked), passing=lambda: next(passed))
    with importable(*zoo.folders):
        plugins = load_plugins(
            [PluginRequest(name="tape")],
            distributions=lambda: distributions_in(*zoo.folders),
            clocks=clocks,
        )
    record = row(plugins, "tape")
    assert record.state is PluginState.READY
    return record.remarks


def test_an_import_within_the_limits_gets_no_remark(zoo: Zoo) -> None:
    zoo.add("tape")
    assert remarks(zoo, WORK_LIMIT_SECONDS, WORK_LIMIT_SECONDS + WAIT_LIMIT_SECONDS) == ()


def test_a_slow_import_is_told_with_its_time_and_the_limit(zoo: Zoo) -> None:
    zoo.add("tape")
    (worked,) = remarks(zoo, 0.35, 0.35)
    assert worked == (
        "importing its entry module took 350 ms of work, and the limit is 20 ms: report it to its author"
    )
    (waited,) = remarks(zoo, 0.0, 2.5)
    assert waited == (
        "importing its entry module waited 2500 ms, and the limit is 1000 ms: report it to its author"
    )


def test_a_heavy_import_is_told_by_name_unless_it_was_there_before(zoo: Zoo) -> None:
    # Stands for the real one, which would stay loaded in the process of the tests.
    zoo.add("tape", "import torch_npu\n" + _flat(GOOD), more={"torch_npu.py": ""})
    assert "torch_npu" in HEAVY_MODULES
    (told,) = remarks(zoo, 0.0, 0.0)
    assert "pulls torch_npu, which an entry module must not" in told
    with importable(*zoo.folders):
        import torch_npu  # noqa: F401

        assert remarks(zoo, 0.0, 0.0) == ()


def test_a_refused_plugin_leaves_none_of_its_modules_loaded(zoo: Zoo) -> None:
    bad = "import zoo_shared\nfrom zoo_bad import helper\n" + _flat(GOOD) + "\nkvferry_rules = lambda: []\n"
    zoo.add("bad", bad, more={"zoo_bad/helper.py": "", "zoo_shared.py": ""})
    with importable(*zoo.folders):
        assert zoo.row("bad").state is PluginState.FAILED
        plugins = load_plugins(
            [PluginRequest(name="bad")], distributions=lambda: distributions_in(*zoo.folders)
        )
        assert row(plugins, "bad").state is PluginState.FAILED
        loaded = {name for name in sys.modules if name.startswith("zoo_")}
        assert loaded == {"zoo_shared"}


def test_what_a_neighbour_of_the_same_package_loaded_stays(zoo: Zoo) -> None:
    files = {"zoo_pair/good.py": _flat(GOOD).replace("{package}", "zoo_pair")}
    files["zoo_pair/good.py"] = (
        files["zoo_pair/good.py"].replace("{name}", "good").replace("{spec}", "good").replace("{prefix}", "A")
    )
    zoo.add("bad", "1 / 0\n", package="zoo_pair", more=files)
    zoo.add("good", "", package="zoo_other", module="zoo_pair.good")
    with importable(*zoo.folders):
        plugins = load_plugins(
            [PluginRequest(name="good"), PluginRequest(name="bad")],
            distributions=lambda: distributions_in(*zoo.folders),
        )
        assert [record.state.value for record in plugins.records] == ["ready", "ready", "failed"]
        loaded = {name for name in sys.modules if name.startswith("zoo_pair")}
        assert loaded == {"zoo_pair", "zoo_pair.good"}
        assert not hasattr(sys.modules["zoo_pair"], "plugin")


def test_nothing_holds_on_to_a_refused_plugin(zoo: Zoo) -> None:
    remember = "\nimport sys, weakref\nsys.zoo_hook = weakref.ref(kvferry_backends)\n"
    zoo.add("first", spec="same")
    zoo.add("second", _flat(GOOD) + remember, spec="same")
    try:
        plugins = zoo.load("first", "second")
        assert row(plugins, "second").state is PluginState.CONFLICT
        gc.collect()
        assert sys.zoo_hook() is None  # type: ignore[attr-defined]
    finally:
        del sys.zoo_hook  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["misspelt", "raising_hook"])
def test_a_plugin_mended_in_place_is_ready_in_the_same_process(zoo: Zoo, name: str) -> None:
    broken = {
        "misspelt": GOOD.replace("kvferry_backends", "kvferry_backend"),
        "raising_hook": GOOD.replace("return [", "raise OSError('not yet')\n        return ["),
    }[name]
    zoo.add(name, broken)
    path = zoo.folders[-1] / f"zoo_{name}/plugin.py"
    with importable(*zoo.folders):
        requests = [PluginRequest(name=name)]
        states = []
        for text in (None, path.read_text().replace("kvferry_backend()", "kvferry_backends()")):
            if text is not None:
                path.write_text(text.replace("raise OSError('not yet')", "pass"))
            plugins = load_plugins(requests, distributions=lambda: distributions_in(*zoo.folders))
            states.append(row(plugins, name).state)
    assert states == [PluginState.FAILED, PluginState.READY]


def _flat(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.splitlines()) + "\n"
