"""The last gate: a chosen implementation is compared with the contract, and nothing of it is called."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest

from kvferry.api import (
    AddressableBackend,
    AnySpec,
    Backend,
    BackendCapabilities,
    BackendSpec,
    Command,
    CommandSpec,
    ConnectorSpec,
    DeviceSpec,
    ErrorKind,
    EvictionPolicy,
    EvictionSpec,
    KVFerryError,
    QuotaPolicy,
)
from kvferry.plugins import PluginRequest, PluginState, load_plugins
from kvferry.plugins.implementation import checked, implementation_faults
from kvferry.plugins.shapes import Shape, shape_of
from kvferry.testing.fake_distributions import importable

from .conftest import GOOD, Zoo


def backend(addressable: bool) -> BackendSpec:
    capabilities = BackendCapabilities(addressable=addressable)
    return BackendSpec(name="x", factory="x:X", options="x:Y", capabilities=capabilities)


def eviction(quotas: bool, options: str | None) -> EvictionSpec:
    return EvictionSpec(name="x", factory="x:X", options=options, quotas=quotas)


SPECS: dict[str, tuple[AnySpec, type, tuple[str, ...]]] = {
    "addressable": (backend(True), AddressableBackend, ("options", "capacity")),
    "keyed": (backend(False), Backend, ("options", "capacity")),
    "eviction": (eviction(False, None), EvictionPolicy, ()),
    "eviction-with-options": (eviction(False, "x:Y"), EvictionPolicy, ("options",)),
    "quotas": (eviction(True, None), QuotaPolicy, ()),
    "quotas-with-options": (eviction(True, "x:Y"), QuotaPolicy, ("options",)),
    "command": (CommandSpec(name="x", factory="x:X", summary=""), Command, ()),
}


def shape(kind: str) -> Shape:
    found = shape_of(SPECS[kind][0])
    assert found is not None
    return found


METHODS = [(kind, method) for kind in SPECS for method in shape(kind).methods()]


def made(wanted: Shape, arguments: tuple[str, ...] | None = None, **changes: str) -> type[Any]:
    """A class with the methods of the contract, each given as ``self, ...`` in ``changes`` or as it is in
    the contract; an empty text leaves it out."""
    body = {"__init__": ", ".join(["self", *(wanted.arguments or ())] if arguments is None else arguments)}
    for name, contract in wanted.methods().items():
        body[name] = ", ".join(inspect.signature(contract).parameters)
    body |= changes
    lines = [f"    def {name}({text}): raise AssertionError" for name, text in body.items() if text]
    namespace: dict[str, Any] = {"__name__": "tape"}
    exec("class Made:\n" + "\n".join(lines), namespace)
    return namespace["Made"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", SPECS)
def test_each_kind_of_spec_has_its_contract_and_its_call(kind: str) -> None:
    _, protocol, arguments = SPECS[kind]
    wanted = shape(kind)
    assert (wanted.protocol, wanted.arguments) == (protocol, arguments)
    assert implementation_faults(made(wanted), wanted) == ()


def test_a_quota_policy_needs_the_methods_of_every_policy_too() -> None:
    assert set(shape("eviction").methods()) < set(shape("quotas").methods())


@pytest.mark.parametrize(("kind", "method"), METHODS)
def test_every_missing_method_is_named(kind: str, method: str) -> None:
    wanted = shape(kind)
    (fault,) = implementation_faults(made(wanted, **{method: ""}), wanted)
    assert fault.startswith(f"tape.Made has no method {method}(")


@pytest.mark.parametrize(("kind", "method"), METHODS)
def test_every_method_must_take_what_core_hands_it(kind: str, method: str) -> None:
    wanted = shape(kind)
    contract = ", ".join(inspect.signature(wanted.methods()[method]).parameters)
    for parameters, said in ((f"{contract}, more", "missing a required argument: 'more'"), ("self", "")):
        faults = implementation_faults(made(wanted, **{method: parameters}), wanted)
        if parameters == contract:
            assert faults == ()
            continue
        (fault,) = faults
        assert fault.startswith(f"core calls {method}(")
        assert f"{method} of tape.Made takes (" in fault
        assert said in fault
    generous = made(wanted, **{method: f"{contract}, more=None, *others, key=1"})
    assert implementation_faults(generous, wanted) == ()


@pytest.mark.parametrize("kind", SPECS)
def test_a_constructor_must_take_what_core_hands_it(kind: str) -> None:
    wanted = shape(kind)
    called = f"core calls tape.Made({', '.join(wanted.arguments or ())}), and it takes "
    (more,) = implementation_faults(
        made(wanted, ("self", *(wanted.arguments or ()), "path", "*", "size")), wanted
    )
    assert more.startswith(called)
    assert "path, *, size)" in more
    if wanted.arguments:
        (fewer,) = implementation_faults(made(wanted, ("self",)), wanted)
        assert fewer.startswith(called + "(): ")


def test_all_faults_of_a_class_are_told_at_once() -> None:
    wanted = shape("addressable")
    faults = implementation_faults(made(wanted, ("self",), open="", close="self, deadline"), wanted)
    assert len(faults) == 3


def test_a_method_that_is_only_inherited_from_the_contract_is_missing() -> None:
    class Lazy(EvictionPolicy):
        def insert(self, entry: object) -> None: ...

    faults = implementation_faults(Lazy, shape("eviction"))
    missing = {"open", "touch", "release", "remove", "evict"}
    assert {fault.partition(" has no method ")[2].partition("(")[0] for fault in faults} == missing
    Lazy()  # its first use changes the constructor that it got from the contract
    assert len(implementation_faults(Lazy, shape("eviction"))) == len(missing)
    assert "it takes ()" in implementation_faults(Lazy, shape("eviction-with-options"))[0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    async def ready_bytes(self): return 0", "is asynchronous"),
        ("    ready_bytes = 0", "ready_bytes of tape.Odd is no method"),
        ("    @property\n    def ready_bytes(self): return 0", "ready_bytes of tape.Odd is no method"),
        ("    @abstractmethod\n    def ready_bytes(self): ...", "is abstract: ready_bytes"),
        ("    @staticmethod\n    def ready_bytes(self): return 0", "core calls ready_bytes()"),
        ("    @staticmethod\n    def ready_bytes(): return 0", ""),
        ("    @classmethod\n    def ready_bytes(cls): return 0", ""),
        ("    def ready_bytes(me): return 0", ""),
        ("    def ready_bytes(*anything): return 0", ""),
        ("    ready_bytes = functools.partialmethod(max, 1)", ""),
    ],
)
def test_odd_methods(body: str, said: str) -> None:
    from abc import ABC, abstractmethod

    namespace: dict[str, Any] = {
        "__name__": "tape",
        "Base": made(shape("addressable")),
        "ABC": ABC,
        "abstractmethod": abstractmethod,
        "functools": functools,
    }
    exec(f"class Odd(Base, ABC):\n{body}", namespace)
    faults = implementation_faults(namespace["Odd"], shape("addressable"))
    assert [said in fault for fault in faults] == ([True] if said else [])


def refuse(why: str) -> Exception:
    return RuntimeError(why)


def test_what_a_function_builds_is_looked_at_before_it_is_handed_out() -> None:
    wanted = shape("addressable")
    fit, unfit = made(wanted, ("self",)), made(wanted, ("self",), close="")
    assert implementation_faults(lambda options, capacity: None, wanted) == ()
    (fault,) = implementation_faults(lambda options: None, wanted)
    assert "it takes (options): too many positional arguments" in fault

    built = checked(lambda options, capacity: fit.__new__(fit), wanted, refuse)(None, 0)
    assert type(built) is fit
    with pytest.raises(RuntimeError, match=r"it built tape\.Made, which does not fit: .* no method close"):
        checked(lambda options, capacity: unfit.__new__(unfit), wanted, refuse)(None, 0)


def test_a_function_that_says_what_it_builds_is_judged_by_that() -> None:
    wanted = shape("addressable")
    unfit = made(wanted, ("self",), close="")

    def build(options: object, capacity: int) -> Any: ...

    build.__annotations__["return"] = unfit
    assert "no method close" in implementation_faults(build, wanted)[0]
    build.__annotations__["return"] = AddressableBackend
    assert implementation_faults(build, wanted) == ()
    build.__annotations__["return"] = "NotThereAtAll"
    assert implementation_faults(build, wanted) == ()


def test_a_class_that_answers_at_run_time_is_looked_at_when_it_is_built() -> None:
    wanted = shape("addressable")

    class Forwarding:
        def __init__(self, options: Any, capacity: int) -> None:
            self._inner = options

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["_inner"], name)

    assert implementation_faults(Forwarding, wanted) == ()
    build = checked(Forwarding, wanted, refuse)
    fit, unfit = made(wanted), made(wanted, close="")
    assert type(build(fit.__new__(fit), 0)) is Forwarding
    with pytest.raises(RuntimeError, match="no method close"):
        build(unfit.__new__(unfit), 0)


def test_a_plain_class_is_handed_out_as_it_is() -> None:
    wanted = shape("eviction")
    fit = made(wanted)
    assert checked(fit, wanted, refuse) is fit


def test_a_class_that_cannot_be_looked_at_is_one_fault() -> None:
    class Hostile(type):
        def __getattribute__(cls, name: str) -> Any:
            raise OSError("go away")

    class Odd(metaclass=Hostile):
        pass

    (fault,) = implementation_faults(Odd, shape("command"))
    assert fault == "it cannot be looked at: OSError: go away"


def test_a_spec_without_a_contract_is_only_imported() -> None:
    assert shape_of(ConnectorSpec(name="x", options="x:Y")) is None
    device = shape_of(DeviceSpec(name="x", factory="x:X"))
    assert device is not None
    assert implementation_faults(made(shape("command")), device) == ()


def test_core_and_the_plugins_of_this_repository_fit() -> None:
    installed = [record for record in load_plugins([]).records if record.state is PluginState.FOUND]
    ours = [each.name for each in installed if each.distribution.startswith("kvferry-")]
    plugins = load_plugins([PluginRequest(name=name) for name in ours])
    plugins.raise_for_faults()
    kinds = ("backend", "eviction", "command", "connector", "channel")
    offered = [(kind, owned.spec.name) for kind in kinds for owned in plugins.specs(kind)]
    assert ("eviction", "lru") in offered
    for kind, name in offered:
        plugins.check_implementation(kind, name)


def test_an_unfit_implementation_is_the_plugins_fault_with_class_call_and_remedy(zoo: Zoo) -> None:
    source = "class Backend:\n    def open(self): ...\n"
    zoo.add("bad", GOOD, more={"zoo_bad/backend.py": source})
    with importable(*zoo.folders):
        plugins = zoo.load("bad")
        for call in (plugins.check_implementation, plugins.factory):
            with pytest.raises(KVFerryError, match="does not fit the contract") as raised:
                call("backend", "bad")
            error = raised.value
            assert error.kind is ErrorKind.PLUGIN
            assert "backend 'bad' of plugin 'bad' (acme-bad 1.0)" in error.what
            assert "core calls zoo_bad.backend.Backend(options, capacity), and it takes ()" in error.why
            assert "core calls open(context), and open of zoo_bad.backend.Backend takes ()" in error.why
            assert "has no method ready_bytes()" in error.why
            assert "give it the shape of kvferry.api.AddressableBackend" in error.remedy
