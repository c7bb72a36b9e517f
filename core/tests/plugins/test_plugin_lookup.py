"""Look-ups, the last gate, facts and the price of hooks."""

from __future__ import annotations

import importlib.metadata

import pytest

from kvferry.api import ENTRY_POINT_GROUP, ErrorKind, HostEnvironment, KVFerryError, hookimpl
from kvferry.compat import rule_faults, run_examples
from kvferry.compat.guard import Raised, Returned
from kvferry.plugins import LoadedPlugins, PluginRequest, load_plugins, resolve
from kvferry.plugins.hookcalls import HookCalls
from kvferry.testing.fake_distributions import importable
from kvferry.testing.light_imports import measure_import

from .conftest import GOOD, Zoo

NOWHERE = HostEnvironment(root="/nonexistent")


def test_core_is_always_there_with_its_policy_facts_and_rules() -> None:
    plugins = load_plugins([], distributions=lambda: ())
    assert [record.name for record in plugins.records] == ["core"]
    assert plugins.eviction("lru").factory.startswith("kvferry.")
    assert plugins.options_class("eviction", "lru") is None
    assert {"kvferry.version", "native.available"} <= set(plugins.facts(NOWHERE).facts)
    assert {owned.owner for owned in plugins.rules()} == {"core"}


def test_an_implementation_is_imported_when_it_is_built_and_not_before(zoo: Zoo) -> None:
    source = """
        class Backend:
            def __init__(self, options, capacity): ...
            def open(self, context): ...
            def ready_bytes(self): ...
            def close(self): ...
    """
    options = "import attrs\n@attrs.frozen\nclass Options:\n    path: str = ''\n"
    zoo.add(
        "late",
        more={"zoo_late/backend.py": source, "zoo_late/options.py": options},
    )
    with importable(*zoo.folders):
        import sys

        plugins = zoo.load("late")
        assert "zoo_late.backend" not in sys.modules
        assert plugins.factory("backend", "late").__name__ == "Backend"
        chosen = plugins.options_class("backend", "late")
        assert chosen is not None
        assert chosen().path == ""


@pytest.mark.parametrize(
    ("backend", "options", "expected"),
    [
        (None, "Options = int\n", ["there is no module 'zoo_bad.backend'"]),
        ("import zoo_no_card\n", "", ["'zoo_no_card', which is not installed"]),
        ("raise SystemExit\n", "", ["failed with SystemExit"]),
        ("class Other: pass\n", "", ["no attribute 'Backend'"]),
        ("Backend = 3\n", "", ["something that cannot be called"]),
    ],
)
def test_a_failing_implementation_says_who_and_why(
    zoo: Zoo, backend: str | None, options: str, expected: list[str]
) -> None:
    more = {} if backend is None else {"zoo_bad/backend.py": backend}
    zoo.add("bad", more={**more, "zoo_bad/options.py": options})
    with importable(*zoo.folders):
        plugins = zoo.load("bad")
        with pytest.raises(KVFerryError) as raised:
            plugins.factory("backend", "bad")
    text = str(raised.value)
    for part in ["backend 'bad' of plugin 'bad' (acme-bad 1.0)", *expected]:
        assert part in text
    assert raised.value.kind is ErrorKind.PLUGIN
    assert raised.value.remedy


def test_a_misspelt_factory_is_told_once_and_with_the_name_that_was_meant(zoo: Zoo) -> None:
    zoo.add("bad", more={"zoo_bad/backend.py": "class Bckend: pass\n"})
    with importable(*zoo.folders), pytest.raises(KVFerryError) as raised:
        zoo.load("bad").factory("backend", "bad")
    assert raised.value.why == "module 'zoo_bad.backend' has no attribute 'Backend'"
    assert raised.value.remedy.startswith(
        "write 'zoo_bad.backend:Bckend', if that is meant; if the plugin is not "
    )


def test_options_must_be_an_attrs_class(zoo: Zoo) -> None:
    zoo.add("bad", more={"zoo_bad/options.py": "Options = dict\n"})
    with importable(*zoo.folders):
        plugins = zoo.load("bad")
        with pytest.raises(KVFerryError, match="cannot be built") as raised:
            plugins.options_class("backend", "bad")
    assert "not an attrs class" in raised.value.why


@pytest.mark.parametrize("text", ["", "a", "a.b", "a:", ":b", "a b:c", "1a:b", "a:b:c"])
def test_a_malformed_import_string_is_refused(text: str) -> None:
    with pytest.raises(KVFerryError, match=r"package\.module:attribute"):
        resolve(text, what="it")


def test_resolve_reaches_nested_attributes() -> None:
    assert resolve("os:path.join", what="it").__name__ == "join"


def test_an_unknown_name_says_what_there_is_and_what_is_not_listed(zoo: Zoo) -> None:
    zoo.add("tape", spec="tape")
    zoo.add("backend_ssd", spec="ssd")
    plugins = zoo.load("tape")
    with pytest.raises(KVFerryError) as slip:
        plugins.backend("tap")
    assert "the listed plugins provide: tape" in slip.value.why
    assert "did you mean 'tape'?" in slip.value.remedy
    with pytest.raises(KVFerryError) as unlisted:
        plugins.backend("ssd")
    assert "'backend_ssd' is installed and not listed" in unlisted.value.remedy
    with pytest.raises(KVFerryError, match="there is no connector 'tape'"):
        plugins.connector("tape")


def remedy_of(plugins: LoadedPlugins, kind: str, name: str) -> str:
    with pytest.raises(KVFerryError) as raised:
        plugins.owned(kind, name)
    return raised.value.remedy


def test_what_an_unlisted_plugin_offers_is_known_without_importing_it(zoo: Zoo) -> None:
    zoo.add("drives", "raise AssertionError('imported')\n", offers=["backend.reel", "eviction.oldest"])
    zoo.add("tape", spec="tape")
    plugins = zoo.load("tape")
    listed = "'drives' is installed and not listed"
    assert remedy_of(plugins, "backend", "reel") == f"{listed}: add it under plugins"
    assert remedy_of(plugins, "eviction", "oldest") == f"{listed}: add it under plugins"
    assert remedy_of(plugins, "eviction", "oldst") == f"did you mean 'oldest'? Its plugin {listed}"
    # Another kind of that name, and a plugin's own name, are no offers.
    for kind, name in (("connector", "reel"), ("backend", "drives")):
        assert (
            remedy_of(plugins, kind, name) == f"list the plugin that provides {kind} {name!r} under plugins"
        )
    assert plugins.offering("backend") == {"reel": "drives"}


def test_the_misspelt_plugin_comes_before_what_it_would_bring(zoo: Zoo) -> None:
    zoo.add("drives", offers=["backend.reel"])
    zoo.add("tape", spec="tape")
    assert remedy_of(zoo.load("drivs"), "backend", "reel") == "mend the plugins that are not usable first"
    plugins = zoo.load("tape", "nowhere")
    assert (
        remedy_of(plugins, "backend", "reel") == "'drives' is installed and not listed: add it under plugins"
    )
    slip = "did you mean 'tape'? Otherwise mend the plugins that are not usable first"
    assert remedy_of(plugins, "backend", "tapes") == slip


FACTS = "\n    @hookimpl\n    def kvferry_facts(env):\n        return {body}\n"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("[3]", "kvferry_facts gave 3, not a Fact"),
        ("[Fact(path='host.python', value=1, origin='x')]", "already given by plugin 'core'"),
        ("2 * [Fact(path='bad.x', value=1, origin='x')]", "'bad.x' twice"),
    ],
)
def test_a_failing_fact_hook_hurts_only_its_plugin(zoo: Zoo, body: str, why: str) -> None:
    good = "[Fact(path='good.root', value=env.root, origin='probe')]"
    zoo.add("bad", GOOD + FACTS.replace("{body}", body))
    zoo.add("good", GOOD + FACTS.replace("{body}", good))
    probed = zoo.load("bad", "good").facts(HostEnvironment(root="/nowhere"))
    assert probed.facts["good.root"].value == "/nowhere"
    assert probed.facts["host.python"].origin == "probe python interpreter"
    (fault,) = probed.required_faults
    assert why in fault.why
    assert "plugin 'bad'" in fault.what
    allowed = zoo.load(PluginRequest(name="bad", required=False), "good").facts(NOWHERE)
    assert allowed.required_faults == ()
    assert len(allowed.skipped_faults) == 1


def test_look_ups_call_no_hook(zoo: Zoo) -> None:
    zoo.add("tape", spec="tape")
    plugins = zoo.load("tape")
    calls: list[str] = []
    stop = plugins.monitor_hook_calls(calls.append)
    for _ in range(1000):
        plugins.backend("tape")
        plugins.eviction("lru")
        plugins.rules()
    assert calls == []
    plugins.facts(NOWHERE)  # shows that the count counts
    stop()
    assert calls == ["kvferry_facts", "kvferry_facts"]


def test_a_registration_that_fails_is_undone_and_its_name_can_be_used_again() -> None:
    @hookimpl
    def kvferry_backends() -> list[str]:
        return ["good"]

    @hookimpl
    def kvferry_facts(engine: object) -> list[str]:
        return ["bad"]

    hooks = HookCalls()
    good = {"kvferry_backends": kvferry_backends}
    assert isinstance(hooks.register("tape", {**good, "kvferry_facts": kvferry_facts}), Raised)
    assert hooks.call("tape", "kvferry_backends") == Returned(())
    assert hooks.register("tape", good) == Returned("tape")
    assert hooks.call("tape", "kvferry_backends") == Returned(("good",))
    assert isinstance(hooks.register("tape", good), Raised)
    hooks.unregister("tape")
    hooks.unregister("tape")
    assert hooks.call("tape", "kvferry_backends") == Returned(())


def _installed_entry_modules() -> dict[str, str]:
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    found = {
        point.name: point.value
        for point in points
        if point.dist is not None and point.dist.name.startswith("kvferry-")
    }
    return {"core": "kvferry.plugins.builtin", **found}


@pytest.mark.parametrize("name", sorted(_installed_entry_modules()))
def test_the_entry_modules_of_this_repository_are_light(name: str) -> None:
    cost = measure_import(_installed_entry_modules()[name], runs=3)
    assert cost.heavy == ()
    assert cost.light, cost


def test_a_heavy_entry_module_is_caught(zoo: Zoo) -> None:
    zoo.add("heavy", "import json\nimport numpy\n")
    cost = measure_import("zoo_heavy.plugin", path=[str(folder) for folder in zoo.folders])
    assert cost.heavy == ("numpy",)
    assert not cost.light


@pytest.mark.parametrize("name", sorted(_installed_entry_modules()))
def test_the_plugins_of_this_repository_load_and_their_rules_do_what_they_say(name: str) -> None:
    plugins = load_plugins([PluginRequest.parse(name)] if name != "core" else [])
    plugins.raise_for_faults()
    record = next(record for record in plugins.records if record.name == name)
    assert record.manifest is not None
    rules = [owned.rule for owned in plugins.rules() if owned.owner == name]
    assert rule_faults(rules, record.manifest.rule_prefix) == ()
    assert [problem for rule in rules for problem in run_examples(rule)] == []
