"""The zoo as an operator meets it: real distributions, the real command, one clear row for each."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import frozen

from .conftest import Ran, ZooEnvironment

UPGRADE = "upgrade the plugin, or report it to its author"


@frozen(kw_only=True)
class Animal:
    """What the row of one plugin has to say."""

    state: str
    api: str | None = ">=1.0,<2"
    provides: tuple[str, ...] = ()
    reason: str = ""
    remedy: str = ""
    distributions: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


ZOO: dict[str, Animal] = {
    "zoo_half_gone": Animal(
        state="failed",
        api=None,
        reason="zoo-half-gone 1.0: there is no module 'zoo_half_gone.plugin'",
        remedy="reinstall the distribution: its metadata and its files do not match",
    ),
    "zoo_import_error": Animal(
        state="failed",
        api=None,
        reason="zoo-import-error 1.0: importing 'zoo_import_error.plugin' failed with ImportError: cannot "
        "import name 'TapeCatalogue' from 'kvferry.api'",
        remedy="run  python -c 'import zoo_import_error.plugin'  for the whole traceback",
    ),
    "zoo_missing_dependency": Animal(
        state="failed",
        api=None,
        reason="zoo-missing-dependency 1.0: importing 'zoo_missing_dependency.plugin' failed: it needs the "
        "module 'zoo_tape_driver', which is not installed",
        remedy="install what provides 'zoo_tape_driver'",
    ),
    "zoo_exits": Animal(
        state="failed",
        api=None,
        reason="zoo-exits 1.0: importing 'zoo_exits.plugin' failed with SystemExit: 3",
        remedy="run  python -c 'import zoo_exits.plugin'  for the whole traceback",
    ),
    "zoo_api_old": Animal(
        state="rejected",
        api="<1.0",
        reason="zoo-api-old 1.0 is written for the plugin API <1.0, and this kvferry offers 1.",
        remedy="pip install --upgrade zoo-api-old",
    ),
    "zoo_api_new": Animal(
        state="rejected",
        api=">=2.0",
        reason="zoo-api-new 1.0 is written for the plugin API >=2.0, and this kvferry offers 1.",
        remedy="pip install --upgrade kvferry",
    ),
    "zoo_core_new": Animal(
        state="rejected",
        api=None,
        reason="zoo-core-new 1.0 requires kvferry >=99, and ",
        remedy="pip install --upgrade kvferry zoo-core-new",
    ),
    "zoo_misspelt_hook": Animal(
        state="failed",
        reason="'kvferry_backend' implements no hook of the contract; did you mean 'kvferry_backends'?",
        remedy=UPGRADE,
    ),
    "zoo_wrong_signature": Animal(
        state="failed",
        reason="'kvferry_facts' wants 'engine', which is not handed over; its signature is "
        "kvferry_facts(env)",
        remedy=UPGRADE,
    ),
    "zoo_raising_hook": Animal(
        state="failed",
        reason="kvferry_lookups failed with OSError: no card in slot 3",
        remedy=UPGRADE,
    ),
    "zoo_twin": Animal(
        state="conflict",
        api=None,
        reason="two distributions bring it: zoo-twin-acme 1.0 and zoo-twin-other 1.0",
        remedy="uninstall one, or write zoo_twin@zoo-twin-acme or zoo_twin@zoo-twin-other",
        distributions=("zoo-twin-acme", "zoo-twin-other"),
    ),
    "zoo_entry_object": Animal(
        state="failed",
        api=None,
        reason="the entry point of zoo-entry-object 1.0 is 'zoo_entry_object.plugin:NOTHING', and it must be "
        "the name of a module",
        remedy="report it to the plugin's author",
    ),
    "zoo_not_there": Animal(
        state="missing",
        api=None,
        reason="no installed distribution brings it; installed: ",
        remedy="install the distribution that brings it, or correct the name",
        distributions=("-",),
    ),
    "zoo_falsy": Animal(state="ready", provides=("backend falsy",)),
    "zoo_lacks_method": Animal(
        state="ready",
        provides=("backend lacks-method", "eviction forgetful", "eviction boastful"),
    ),
    "zoo_wrong_constructor": Animal(state="ready", provides=("backend wrong-constructor",)),
    "zoo_heavy": Animal(
        state="ready",
        provides=("backend heavy",),
        remarks=("importing its entry module pulls zmq, which an entry module must not",),
    ),
    "zoo_slow": Animal(
        state="ready",
        provides=("backend slow",),
        remarks=(
            " ms of work, and the limit is 20 ms",
            " ms, and the limit is 1000 ms",
        ),
    ),
    "zoo_editable": Animal(state="ready", provides=("backend editable",)),
    "zoo_good": Animal(state="ready", provides=("backend good",)),
}
"""In the order in which the configuration lists them: the good one last."""

BAD = [name for name, animal in ZOO.items() if animal.state != "ready"]


def listing(names: list[str] | dict[str, Animal], tail: str = "") -> str:
    return "plugins:\n" + "".join(f"  - {name}\n" for name in names) + tail


@pytest.fixture(scope="session")
def shown(zoo: ZooEnvironment) -> Ran:
    return zoo.kvferry("plugins", "--config", zoo.write(listing(ZOO), "all.yaml"))


@pytest.fixture(scope="session")
def rows(zoo: ZooEnvironment) -> dict[str, dict[str, Any]]:
    ran = zoo.kvferry("plugins", "--format", "json", "--config", zoo.write(listing(ZOO), "all.yaml"))
    assert ran.code == 4
    return {row["name"]: row for row in ran.json["plugins"]}


@pytest.mark.parametrize("name", ZOO)
def test_each_plugin_has_a_row_that_says_everything(rows: dict[str, Any], name: str) -> None:
    row, animal = rows[name], ZOO[name]
    assert row["state"] == animal.state
    assert row["api"] == animal.api
    assert [f"{each['kind']} {each['name']}" for each in row["provides"]] == list(animal.provides)
    owners = [] if animal.distributions == ("-",) else animal.distributions or (name.replace("_", "-"),)
    assert row["distributions"] == [{"name": owner, "version": "1.0"} for owner in owners]
    assert row["reason"].startswith(animal.reason)
    assert bool(row["reason"]) == bool(row["remedy"]) == (animal.state != "ready")
    assert row["remedy"].endswith(animal.remedy)
    for remark in animal.remarks:
        assert any(remark in told for told in row["remarks"])
    assert (row["listed"], row["required"]) == (True, True)
    assert row["origin"] == f"all.yaml:{list(ZOO).index(name) + 2}:5"


@pytest.mark.parametrize("name", ZOO)
def test_the_table_says_the_same_as_the_json(shown: Ran, rows: dict[str, Any], name: str) -> None:
    lines = shown.out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[:1] == [name])
    row = rows[name]
    owners = " and ".join(f"{each['name']} {each['version']}" for each in row["distributions"])
    provides = ", ".join(f"{each['kind']} {each['name']}" for each in row["provides"])
    cells = [name, row["state"], owners or "-", row["api"] or "-", provides or "-"]
    assert [cell.strip() for cell in lines[at].split("  ") if cell.strip()] == cells
    below = lines[at + 1 : at + 3]
    if row["reason"]:
        assert below == [f"  why  {row['reason']}", f"  fix  {row['remedy']}"]
    else:
        assert not any(line.startswith(("  why", "  fix")) for line in below[:1])


def test_the_table_remarks_on_heavy_and_slow_imports(shown: Ran) -> None:
    notes = [line for line in shown.out.splitlines() if line.startswith("  note ")]
    assert shown.code == 4
    assert sum("pulls zmq" in note for note in notes) == 1
    assert sum("of work, and the limit is 20 ms" in note for note in notes) >= 1
    assert sum("waited" in note for note in notes) >= 1


def test_nothing_is_imported_of_what_is_not_listed(zoo: ZooEnvironment) -> None:
    ran = zoo.kvferry("plugins", "--format", "json")
    assert ran.code == 0
    assert ran.err == ""
    states = {row["name"]: row["state"] for row in ran.json["plugins"] if row["name"].startswith("zoo_")}
    expected = dict.fromkeys(ZOO, "found") | {"zoo_twin": "conflict", "zoo_core_new": "rejected"}
    del expected["zoo_not_there"]
    assert states == expected
    assert all(row["api"] is None for row in ran.json["plugins"] if row["name"] != "core")


def test_a_required_plugin_stops_the_check_with_everything_that_is_wrong(zoo: ZooEnvironment) -> None:
    tiers = "tiers:\n  cpu: {use: good, capacity: 1GiB, dept: 3}\nchunk_token: 5\n"
    file = zoo.write(listing([*BAD, "zoo_good"], tiers))
    ran = zoo.kvferry("check", file)
    assert ran.code == 4
    for line, name in enumerate(BAD, start=2):
        assert f"error[plugin] {file}:{line}:5: plugin '{name}' " in ran.out
        assert ZOO[name].reason in ran.out
        assert ZOO[name].remedy in ran.out
    assert "chunk_token: unknown key" in ran.out
    assert "tiers.cpu.dept: unknown key\n  fix      did you mean 'depth'?" in ran.out
    assert ran.out.count("error[plugin]") == len(BAD)
    assert ran.out.count("error[config]") == 2


START = """
import json, sys
from pathlib import Path
from kvferry.api import HostEnvironment, KVFerryError
from kvferry.config import ConfigSources
from kvferry.runtime.startup import prepare

try:
    prepared = prepare(
        ConfigSources(file=Path(sys.argv[1]), environment={}, overrides={}), HostEnvironment()
    )
except KVFerryError as error:
    print(json.dumps({"error": str(error), "kind": error.kind.value}))
else:
    tier = prepared.config.tiers["cpu"]
    built = prepared.plugins.factory("backend", tier.use)(tier.options, tier.capacity)
    print(json.dumps({"built": type(built).__module__, "notices": prepared.examination.notices()}))
"""


def test_a_required_plugin_stops_the_start_with_what_the_check_says(zoo: ZooEnvironment) -> None:
    file = zoo.write(listing([*BAD, "zoo_good"], "tiers: {cpu: {use: good, capacity: 1MiB}}\n"))
    started = zoo.script(START, file).json
    assert started["kind"] == "plugin"
    assert started["error"].endswith(zoo.kvferry("check", file).out.rstrip("\n"))


def test_skipping_is_the_users_word_and_leaves_a_trace(zoo: ZooEnvironment) -> None:
    skipped = [f"{{name: {name}, on_error: skip}}" for name in BAD]
    tail = "tiers: {cpu: {use: good, capacity: 1MiB}}\n"
    file = zoo.write(listing([*skipped, "zoo_good"], tail))

    checked = zoo.kvferry("check", file)
    assert checked.code == 0, checked.out
    assert checked.out.count("warning[plugin]") == len(BAD)
    assert zoo.kvferry("check", "--strict", file).code == 1

    listed = zoo.kvferry("plugins", "--config", file)
    assert listed.code == 0
    for line, name in enumerate(BAD, start=2):
        assert f"note skipped, because {file}:{line}:5 says on_error: skip" in listed.out, name

    started = zoo.script(START, file).json
    assert started["built"] == "zoo_good.backend"
    assert started["notices"].count("warning[plugin]") == len(BAD)


def test_a_plugin_that_works_is_skipped_by_nobody(zoo: ZooEnvironment) -> None:
    listed = zoo.kvferry("plugins", "--config", zoo.write("plugins: [{name: zoo_good, on_error: skip}]\n"))
    assert listed.code == 0
    assert "skipped" not in listed.out


@pytest.mark.parametrize("owner", ["acme", "other"])
def test_a_distribution_is_chosen_by_name(zoo: ZooEnvironment, owner: str) -> None:
    file = zoo.write(f"plugins: [zoo_twin@Zoo.Twin_{owner}]\n")
    ran = zoo.kvferry("plugins", "--format", "json", "--config", file)
    (row,) = [row for row in ran.json["plugins"] if row["name"] == "zoo_twin"]
    assert (ran.code, row["state"]) == (0, "ready")
    assert row["distributions"] == [{"name": f"zoo-twin-{owner}", "version": "1.0"}]
    assert row["provides"] == [{"kind": "backend", "name": f"twin-of-{owner}"}]


def test_an_editable_installation_shows_what_its_source_says_now(zoo: ZooEnvironment) -> None:
    source = zoo.sources / "zoo-editable/src/zoo_editable/plugin.py"
    before = source.read_text()
    file = zoo.write("plugins: [zoo_editable]\n")
    try:
        source.write_text(before.replace('name="editable"', 'name="edited-since"'))
        assert "backend edited-since" in zoo.kvferry("plugins", "--config", file).out
    finally:
        source.write_text(before)


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        (
            "lacks-method, capacity: 1GiB",
            [
                "error[plugin] c.yaml:2:20: backend 'lacks-method' of plugin 'zoo_lacks_method' "
                "(zoo-lacks-method 1.0) does not fit the contract",
                "zoo_lacks_method.backend.Backend has no method ready_bytes() (did you mean 'ready_byte'?)",
                "give it the shape of kvferry.api.AddressableBackend; if the plugin is not yours, upgrade",
            ],
        ),
        (
            "wrong-constructor, capacity: 1GiB",
            [
                "core calls zoo_wrong_constructor.backend.Backend(options, capacity), and it takes "
                "(path, *, options, capacity): too many positional arguments",
            ],
        ),
        (
            "good, capacity: 1GiB, eviction: forgetful",
            [
                "zoo_lacks_method.policy.Forgetful has no method release(ids)",
                "kvferry.api.EvictionPolicy",
            ],
        ),
        (
            "good, capacity: 1GiB, eviction: boastful",
            [
                "zoo_lacks_method.policy.Boastful has no method evict_owned(owner, need, claim)",
                "kvferry.api.QuotaPolicy",
            ],
        ),
    ],
)
def test_an_implementation_that_does_not_fit_stops_the_start_that_chose_it(
    zoo: ZooEnvironment, tier: str, said: list[str]
) -> None:
    listed = "plugins: [zoo_good, zoo_lacks_method, zoo_wrong_constructor]\n"
    file = zoo.write(f"{listed}tiers: {{cpu: {{use: {tier}}}}}\n")
    started = zoo.script(START, file).json
    assert started["kind"] == "plugin"
    assert started["error"].count("error[plugin]") == 1
    for part in said:
        assert part in started["error"]
    assert zoo.kvferry("check", file).code == 4


def test_descriptions_of_a_bad_implementation_that_nobody_chose_harm_nobody(zoo: ZooEnvironment) -> None:
    listed = "plugins: [zoo_lacks_method, zoo_wrong_constructor, zoo_good]\n"
    file = zoo.write(f"{listed}tiers: {{cpu: {{use: good, capacity: 1MiB}}}}\n")
    assert zoo.script(START, file).json["built"] == "zoo_good.backend"


MEND = """
import json, pathlib, sys
from kvferry.api import HostEnvironment
from kvferry.plugins import PluginRequest, load_plugins

path, mended = pathlib.Path(sys.argv[1]), sys.argv[2]

def look():
    plugins = load_plugins([PluginRequest.parse("zoo_raising_hook"), PluginRequest.parse("zoo_good")])
    calls = []
    stop = plugins.monitor_hook_calls(calls.append)
    facts = plugins.facts(HostEnvironment(root="/nonexistent")).facts
    stop()
    return {
        "states": {record.name: record.state.value for record in plugins.records if record.listed},
        "calls": len(calls),
        "fact": "zoo.raising" in facts,
        "backends": [owned.spec.name for owned in plugins.specs("backend")],
        "modules": sorted(name for name in sys.modules if name.startswith("zoo_raising_hook")),
    }

before = look()
path.write_text(mended)
print(json.dumps([before, look()]))
"""


def test_a_failed_registration_leaves_nothing_behind_and_can_be_mended(zoo: ZooEnvironment) -> None:
    path = zoo.site / "zoo_raising_hook/plugin.py"
    text = path.read_text()
    try:
        ran = zoo.script(MEND, path, text.replace('raise OSError("no card in slot 3")', "return []"))
    finally:
        path.write_text(text)
    before, after = json.loads(ran.out)
    assert before == {
        "states": {"core": "ready", "zoo_raising_hook": "failed", "zoo_good": "ready"},
        "calls": 2,
        "fact": False,
        "backends": ["good"],
        "modules": [],
    }
    assert after["states"]["zoo_raising_hook"] == "ready"
    assert after["calls"] == 3
    assert after["fact"]
    assert after["backends"] == ["raising-hook", "good"]
