"""Every way in which a plugin can be bad is one clear row, and the others stay usable."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvferry.api import HostEnvironment, KVFerryErrors
from kvferry.plugins import PluginRequest, PluginState, load_plugins
from kvferry.testing.fake_distributions import distributions_in, importable

from .conftest import GOOD, Zoo, row

MANIFEST = """
    from kvferry.api import Fact, Manifest, hookimpl
    MANIFEST = Manifest(name="{name}", api=">=1.0,<2", rule_prefix="{prefix}")
"""

BAD: dict[str, dict[str, Any]] = {
    "absent": {
        "module": "zoo_nowhere.plugin",
        "reason": "there is no module 'zoo_nowhere.plugin'",
        "remedy": "reinstall",
    },
    "broken_import": {
        "plugin": "import zoo_needs_this_library\n",
        "reason": "needs the module 'zoo_needs_this_library', which is not installed",
        "remedy": "install what provides 'zoo_needs_this_library'",
    },
    "raising": {"plugin": "1 / 0\n", "reason": "ZeroDivisionError: division by zero"},
    "exiting": {"plugin": "raise SystemExit(3)\n", "reason": "SystemExit: 3"},
    "no_manifest": {
        "plugin": "x = 1\n",
        "reason": "has no MANIFEST",
        "remedy": "write  MANIFEST = Manifest(name='no_manifest', ...)  into it; if the plugin is not",
    },
    "odd_manifest": {"plugin": "MANIFEST = {'name': 'x'}\n", "reason": "MANIFEST of type dict"},
    "other_name": {
        "plugin": MANIFEST.replace("{name}", "somebody"),
        "reason": "calls itself 'somebody'",
        "remedy": "rename it to 'other_name' in the MANIFEST, or the entry point to 'somebody'; if the",
    },
    "bad_range": {
        "plugin": MANIFEST.replace(">=1.0,<2", "new"),
        "reason": "not a PEP 440 range",
        "remedy": "write one, for example  api='>=1.0,<2'; if",
    },
    "bad_prefix": {
        "plugin": MANIFEST.replace("{prefix}", "P2"),
        "reason": "rule prefix 'P2'",
        "remedy": "choose another, for example  rule_prefix='ACME'; if",
    },
    "too_new": {
        "plugin": MANIFEST.replace(">=1.0,<2", ">=2.0"),
        "state": PluginState.REJECTED,
        "reason": "written for the plugin API >=2.0, and this kvferry offers 1.0",
        "remedy": "pip install --upgrade kvferry",
    },
    "too_old": {
        "plugin": MANIFEST.replace(">=1.0,<2", "<1.0"),
        "state": PluginState.REJECTED,
        "reason": "written for the plugin API <1.0",
        "remedy": "pip install --upgrade acme-too-old",
    },
    "misspelt": {
        "plugin": MANIFEST + "\n    @hookimpl\n    def kvferry_backend(): return []\n",
        "reason": "implements no hook of the contract; did you mean 'kvferry_backends'?",
        "remedy": "rename 'kvferry_backend' to 'kvferry_backends'; if the plugin is not yours, upgrade the",
    },
    "unmarked": {
        "plugin": MANIFEST + "\n    def kvferry_backends(): return []\n",
        "reason": "'kvferry_backends' is not marked",
        "remedy": "write  @hookimpl  above 'kvferry_backends'; if the plugin is not yours, ",
    },
    "unprefixed": {
        "plugin": MANIFEST + "\n    @hookimpl\n    def backends(): return []\n",
        "reason": "'backends' implements no hook",
    },
    "signature": {
        "plugin": MANIFEST + "\n    @hookimpl\n    def kvferry_facts(env, engine): return []\n",
        "reason": "wants 'engine', which is not handed over; its signature is kvferry_facts(env)",
        "remedy": "write it as  def kvferry_facts(env); if",
    },
    "wrapping": {
        "plugin": MANIFEST + "\n    @hookimpl(wrapper=True)\n    def kvferry_rules(): yield\n",
        "reason": "is a wrapper",
    },
    "waiting": {
        "plugin": MANIFEST + "\n    @hookimpl\n    async def kvferry_rules(): return []\n",
        "reason": "is asynchronous",
    },
    "raising_hook": {
        "plugin": GOOD + "\n    @hookimpl\n    def kvferry_channels(): raise OSError('no card')\n",
        "reason": "kvferry_channels failed with OSError: no card",
    },
    "late_hook": {
        "plugin": GOOD + "\n    @hookimpl\n    def kvferry_channels():\n        yield 1\n"
        "        raise KeyError('late')\n",
        "reason": "kvferry_channels failed with KeyError: 'late'",
    },
    "no_list": {
        "plugin": MANIFEST + "\n    @hookimpl\n    def kvferry_rules(): return 'none'\n",
        "reason": "returned 'none', not a list",
    },
    "stranger": {
        "plugin": MANIFEST + "\n    @hookimpl\n    def kvferry_backends(): return [7]\n",
        "reason": "kvferry_backends gave 7, not a BackendSpec",
    },
    "no_rule": {
        "plugin": MANIFEST + "\n    @hookimpl\n    def kvferry_rules(): return ['no tea']\n",
        "reason": "kvferry_rules gave 'no tea', not a Rule",
    },
    "bad_factory": {
        "plugin": GOOD.replace(".backend:Backend", ".backend.Backend"),
        "reason": "it reads package.module:attribute",
    },
    "twice": {
        "plugin": GOOD.replace("return [", "return 2 * ["),
        "reason": "it gives backend twice twice",
    },
    "too_old_distribution": {
        "requires": ["kvferry<0.1"],
        "state": PluginState.REJECTED,
        "reason": "requires kvferry <0.1",
        "remedy": "pip install --upgrade",
    },
    "unreadable": {"requires": ["kvferry >>> 1"], "state": PluginState.REJECTED, "reason": "cannot be read"},
    "entry_object": {"module": "zoo_entry_object.plugin:thing", "reason": "name of a module"},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plugin_is_one_row_and_its_neighbours_work(zoo: Zoo, name: str) -> None:
    wanted = dict(BAD[name])
    state = wanted.pop("state", PluginState.FAILED)
    reason, remedy = wanted.pop("reason"), wanted.pop("remedy", "")
    zoo.add("before")
    zoo.add(name, **wanted)
    zoo.add("behind")
    plugins = zoo.load("before", name, "behind")
    bad = row(plugins, name)
    assert bad.state is state
    assert reason in bad.reason
    assert bad.remedy
    assert remedy in bad.remedy
    assert bad.provides == ()
    assert plugins.backend("before").name == "before"
    assert plugins.backend("behind").name == "behind"
    assert {owned.plugin.name for owned in plugins.specs("backend")} == {"before", "behind"}
    assert [rule for rule in plugins.rules() if rule.owner == name] == []
    with pytest.raises(KVFerryErrors) as raised:
        plugins.raise_for_faults()
    (error,) = raised.value.errors
    assert reason in str(error)
    assert "c.yaml:3:3" in str(error)


def test_all_bad_plugins_are_reported_in_one_go(zoo: Zoo) -> None:
    for name, wanted in BAD.items():
        made = {k: v for k, v in wanted.items() if k not in ("state", "reason", "remedy")}
        zoo.add(name, **made)
    plugins = zoo.load(*BAD, "not_there")
    with pytest.raises(KVFerryErrors) as raised:
        plugins.raise_for_faults()
    assert len(raised.value.errors) == len(BAD) + 1


def test_nothing_is_imported_that_is_not_listed(zoo: Zoo) -> None:
    zoo.add("listed", "import sys\nsys.zoo_loaded.append('listed')\n" + _flat(GOOD))
    zoo.add("unlisted", "import sys\nsys.zoo_loaded.append('unlisted')\n" + _flat(GOOD))
    zoo.add(
        "rejected",
        "import sys\nsys.zoo_loaded.append('rejected')\n" + _flat(GOOD),
        requires=["kvferry>=99"],
    )
    sys.zoo_loaded = []  # type: ignore[attr-defined]
    try:
        plugins = zoo.load("rejected", "listed")
        assert sys.zoo_loaded == ["listed"]  # type: ignore[attr-defined]
    finally:
        del sys.zoo_loaded  # type: ignore[attr-defined]
    assert row(plugins, "unlisted").state is PluginState.FOUND
    assert row(plugins, "rejected").state is PluginState.REJECTED


def test_the_order_of_the_list_is_the_order_of_everything(zoo: Zoo) -> None:
    for name in ("alpha", "beta", "gamma"):
        zoo.add(name)
    forward, backward = ["alpha", "beta", "gamma"], ["gamma", "beta", "alpha"]
    for names in (forward, backward):
        plugins = zoo.load(*names)
        assert [record.name for record in plugins.records] == ["core", *names]
        assert [owned.spec.name for owned in plugins.specs("backend")] == names


def test_two_distributions_of_one_name_conflict_until_one_is_chosen(zoo: Zoo) -> None:
    zoo.add("twin", distribution="acme-twin", package="zoo_twin_a", spec="from-acme")
    zoo.add("twin", distribution="Other.Twin", package="zoo_twin_b", spec="from-other")
    plugins = zoo.load("twin")
    record = row(plugins, "twin")
    assert record.state is PluginState.CONFLICT
    assert "acme-twin 1.0" in record.reason
    assert "Other.Twin 1.0" in record.reason
    assert "twin@acme-twin" in record.remedy
    assert plugins.specs("backend") == ()
    assert [o.spec.name for o in zoo.load("twin@acme-twin").specs("backend")] == ["from-acme"]
    # The names of distributions are equal whatever their dots, hyphens and case.
    assert [o.spec.name for o in zoo.load("twin@other-twin").specs("backend")] == ["from-other"]
    stranger = row(zoo.load("twin@acme-twim"), "twin")
    assert stranger.state is PluginState.MISSING
    assert "did you mean 'acme-twin'?" in stranger.remedy


def test_an_unlisted_conflict_is_shown_and_harms_nobody(zoo: Zoo) -> None:
    zoo.add("twin", distribution="acme-twin", package="zoo_twin_a")
    zoo.add("twin", distribution="other-twin", package="zoo_twin_b")
    zoo.add("good")
    plugins = zoo.load("good")
    assert row(plugins, "twin").state is PluginState.CONFLICT
    plugins.raise_for_faults()


def test_one_distribution_found_twice_on_the_path_is_no_conflict(zoo: Zoo) -> None:
    zoo.add("copy", spec="first", package="zoo_copy")
    zoo.add("copy", spec="second", package="zoo_copy", version="0.9")
    plugins = zoo.load("copy")
    assert row(plugins, "copy").distribution == "acme-copy 1.0"
    assert [owned.spec.name for owned in plugins.specs("backend")] == ["first"]


def test_a_name_that_two_plugins_provide_goes_to_the_first_listed(zoo: Zoo) -> None:
    zoo.add("one", spec="same")
    zoo.add("two", spec="same")
    for first, second in (("one", "two"), ("two", "one")):
        plugins = zoo.load(first, second)
        assert plugins.owned("backend", "same").plugin.name == first
        late = row(plugins, second)
        assert late.state is PluginState.CONFLICT
        assert f"backend same is already provided by plugin '{first}'" in late.reason


def test_a_rule_prefix_has_one_owner(zoo: Zoo) -> None:
    zoo.add("one", prefix="ZOO")
    zoo.add("two", prefix="ZOO")
    zoo.add("greedy", prefix="CORE")
    assert "rule prefix ZOO already belongs to plugin 'one'" in zoo.row("one", "two").reason
    assert "rule prefix CORE already belongs to plugin 'core'" in zoo.row("greedy").reason


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("backend_tap", "did you mean 'backend_tape'?"),
        ("backend-tape", "did you mean 'backend_tape'?"),
        ("Backend_Tape", "did you mean 'backend_tape'?"),
        ("acme-backend-tape", "write backend_tape"),
        ("acme_backend_tape", "write backend_tape"),
        ("backend_disk", "install the distribution that brings it, or correct the name"),
        ("tape", "install the distribution that brings it, or correct the name"),
    ],
)
def test_a_missing_plugin_says_what_was_meant_and_makes_up_no_distribution(
    zoo: Zoo, name: str, remedy: str
) -> None:
    zoo.add("backend_tape")
    record = zoo.row(name)
    assert record.state is PluginState.MISSING
    assert record.remedy == remedy
    assert "pip install" not in record.reason + record.remedy


def test_a_plugin_listed_twice_is_told_and_loaded_once(zoo: Zoo) -> None:
    zoo.add("good")
    plugins = zoo.load("good", "good")
    first, second = (record for record in plugins.records if record.name == "good")
    assert (first.state, second.state) == (PluginState.READY, PluginState.CONFLICT)
    assert "listed twice" in second.reason
    assert plugins.backend("good")


def test_the_built_in_name_cannot_be_taken(zoo: Zoo) -> None:
    zoo.add("core", prefix="MINE")
    plugins = zoo.load("core")
    first, second = plugins.records
    assert (first.name, first.state) == ("core", PluginState.READY)
    assert second.state is PluginState.CONFLICT
    assert "built-in" in second.reason


def test_skipping_is_the_users_word(zoo: Zoo) -> None:
    zoo.add("raising", "1 / 0\n")
    plugins = zoo.load(PluginRequest(name="raising", required=False))
    plugins.raise_for_faults()
    (skipped,) = plugins.skipped()
    assert skipped.state is PluginState.FAILED


def test_a_plugin_that_failed_leaves_nothing_registered(zoo: Zoo) -> None:
    bad = GOOD + "\n    @hookimpl\n    def kvferry_rules(): raise OSError\n"
    bad += "\n    @hookimpl\n    def kvferry_facts(env): return [Fact(path='a', value=1, origin='')]\n"
    zoo.add("bad", bad)
    plugins = zoo.load("bad")
    calls: list[str] = []
    stop = plugins.monitor_hook_calls(calls.append)
    probed = plugins.facts(HostEnvironment(root="/nonexistent"))
    stop()
    assert "a" not in probed.facts
    assert calls == ["kvferry_facts"]  # core's alone


def test_a_falsy_plugin_object_is_a_plugin(zoo: Zoo) -> None:
    text = (
        GOOD
        + """
    import sys, types

    class Falsy(types.ModuleType):
        def __bool__(self):
            return False

    falsy = Falsy(__name__)
    falsy.__dict__.update(globals())
    sys.modules[__name__] = falsy
    """
    )
    zoo.add("falsy", text)
    plugins = zoo.load("falsy")
    assert row(plugins, "falsy").state is PluginState.READY
    assert plugins.backend("falsy").name == "falsy"


def test_a_module_that_is_equal_to_everything_harms_nobody(zoo: Zoo) -> None:
    text = (
        GOOD
        + """
    import sys, types

    class Same(types.ModuleType):
        def __eq__(self, other):
            return True

        __hash__ = None

    same = Same(__name__)
    same.__dict__.update(globals())
    sys.modules[__name__] = same
    """
    )
    for name in ("before", "behind"):
        zoo.add(name)
    zoo.add("same", text)
    plugins = zoo.load("before", "same", "behind")
    assert [record.state for record in plugins.records] == [PluginState.READY] * 4
    assert [owned.spec.name for owned in plugins.specs("backend")] == ["before", "same", "behind"]


@pytest.mark.parametrize(
    ("installed", "requires", "state"),
    [
        ("0.4.2", "kvferry>=0.4,<0.6", PluginState.READY),
        ("0.6.0.dev3+g1234", "kvferry>=0.4", PluginState.READY),
        ("0.5.0rc1", "kvferry>=0.4,<0.6", PluginState.READY),
        ("0.3.9", "kvferry>=0.4,<0.6", PluginState.REJECTED),
        ("0.6.0", "kvferry>=0.4,<0.6", PluginState.REJECTED),
        ("0.4.2", "kvferry>=0.4; python_version < '3'", PluginState.READY),
        ("0.4.2", "kvferry>=9; python_version < '3'", PluginState.READY),
        ("0.4.2", "kvferry>=9; extra == 'test'", PluginState.READY),
        ("0.4.2", "attrs>=9999", PluginState.READY),
    ],
)
def test_a_distribution_for_another_kvferry_is_rejected_by_its_metadata_alone(
    zoo: Zoo, installed: str, requires: str, state: PluginState
) -> None:
    imported = "raise AssertionError('imported')\n" if state is PluginState.REJECTED else None
    zoo.add("tape", imported, requires=[requires])
    with importable(*zoo.folders):
        plugins = load_plugins(
            [PluginRequest(name="tape")],
            distributions=lambda: distributions_in(*zoo.folders),
            core_version=installed,
        )
    record = row(plugins, "tape")
    assert record.state is state
    if state is PluginState.REJECTED:
        assert f"{installed} is installed" in record.reason
        assert "pip install --upgrade kvferry acme-tape" in record.remedy


def test_two_halves_of_uninstalled_distributions_are_not_taken_for_one(zoo: Zoo) -> None:
    for name in ("one", "two"):
        zoo.add(name)
        (metadata,) = zoo.folders[-1].glob("*.dist-info/METADATA")
        metadata.unlink()
    plugins = zoo.load("one", "two")
    assert [row(plugins, name).distribution for name in ("one", "two")] == ["(no name) (no version)"] * 2


def test_a_refused_plugin_shows_what_was_read_of_its_manifest(zoo: Zoo) -> None:
    zoo.add("new", MANIFEST.replace(">=1.0,<2", ">=2.0"))
    zoo.add("bad", GOOD + "\n    kvferry_rules = lambda: []\n")
    plugins = zoo.load("new", "bad")
    for name, api in (("new", ">=2.0"), ("bad", ">=1.0,<2")):
        manifest = row(plugins, name).manifest
        assert manifest is not None
        assert manifest.api == api


def test_loading_again_after_mending_works_in_the_same_process(zoo: Zoo) -> None:
    zoo.add("mended", "1 / 0\n")
    assert zoo.row("mended").state is PluginState.FAILED
    zoo.add("mended", version="1.1")
    zoo.folders.reverse()
    assert zoo.row("mended").state is PluginState.READY


def test_an_interrupt_is_the_users_and_passes(zoo: Zoo) -> None:
    zoo.add("interrupted", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        zoo.load("interrupted")


def test_unreadable_metadata_of_strangers_hurts_nobody(zoo: Zoo) -> None:
    class Stranger:
        def read_text(self, name: str) -> str:
            raise OSError("disk")

    plugins = load_plugins([], distributions=lambda: [Stranger()])  # type: ignore[list-item]
    assert [record.name for record in plugins.records] == ["core"]


def _flat(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.splitlines()) + "\n"
