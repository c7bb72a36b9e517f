"""Gate 5: whether an imported implementation fits the contract, found before anything is built."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Protocol

from kvferry.compat.guard import Raised, call_foreign
from kvferry.plugins.hints import did_you_mean
from kvferry.plugins.shapes import Shape, call_fault


def implementation_faults(factory: Callable[..., Any], shape: Shape) -> tuple[str, ...]:
    """One sentence per difference between ``factory`` and what core expects. Calls nothing of it.

    A class must have every method of the contract; one that it only inherits from the contract itself
    is an empty body and does not count. Of a function only the call is judged, and its result's class
    where an annotation names it; :func:`checked` looks at the rest.
    """
    looked = call_foreign(lambda: tuple(_faults(factory, shape)))
    if isinstance(looked, Raised):
        return (f"it cannot be looked at: {looked}",)
    return looked.value


def checked(
    factory: Callable[..., Any], shape: Shape, refuse: Callable[[str], Exception]
) -> Callable[..., Any]:
    """``factory``, or for one that is not a plain class a call that also looks at what it built.

    The call raises ``refuse(faults)`` for an object without the methods of the contract.
    """
    if isinstance(factory, type) and not _answers_at_run_time(factory):
        return factory

    @functools.wraps(factory, updated=())
    def build(*arguments: Any) -> Any:
        built = factory(*arguments)
        looked = call_foreign(lambda: tuple(_method_faults(built, type(built), shape)))
        faults = (str(looked),) if isinstance(looked, Raised) else looked.value
        if faults:
            raise refuse(f"it built {_name(type(built))}, which does not fit: {'; '.join(faults)}")
        return built

    return build


def _faults(factory: Callable[..., Any], shape: Shape) -> Iterator[str]:
    name = _name(factory)
    if shape.arguments is not None:
        builder = _constructor(factory)
        fault = call_fault(builder, shape.arguments)
        if fault:
            called = f"{name}({', '.join(shape.arguments)})"
            yield f"core calls {called}, and it takes {_parameters(builder)}: {fault}"
    built = factory if isinstance(factory, type) else _annotated_result(factory)
    if built is None:
        return
    left = sorted(getattr(built, "__abstractmethods__", ()))
    if left:
        yield f"{_name(built)} is abstract: {', '.join(left)} is not implemented"
    if not _answers_at_run_time(built):
        yield from _method_faults(built, built, shape)


def _method_faults(found_on: Any, cls: type, shape: Shape) -> Iterator[str]:
    """Faults of the methods of ``found_on``: a class, or an object of class ``cls``."""
    for name, contract in shape.methods().items():
        expected = tuple(inspect.signature(contract).parameters)[1:]
        written = f"{name}({', '.join(expected)})"
        method = getattr(found_on, name, None)
        static = inspect.getattr_static(found_on, name, None)
        if method is None or static is contract:
            hint = did_you_mean(name, [each for each in dir(cls) if not each.startswith("_")])
            yield f"{_name(cls)} has no method {written}" + (f" ({hint})" if hint else "")
        elif not callable(method):
            yield f"{name} of {_name(cls)} is no method"
        elif inspect.iscoroutinefunction(method):
            yield f"{name} of {_name(cls)} is asynchronous, and core calls it plainly"
        else:
            plain = found_on is cls and isinstance(static, FunctionType)
            fault = call_fault(method, ("self", *expected) if plain else expected)
            if fault:
                yield f"core calls {written}, and {name} of {_name(cls)} takes {_parameters(method)}: {fault}"


def _constructor(factory: Callable[..., Any]) -> Callable[..., Any]:
    """What is called when ``factory`` is. A class that inherits its constructor from a contract seems to
    take anything until it is first used, and then takes nothing."""
    if not isinstance(factory, type):
        return factory
    owner = next(base for base in factory.__mro__ if "__init__" in vars(base))
    return object if Protocol in owner.__bases__ else factory


def _answers_at_run_time(cls: type) -> bool:
    """Whether only an object can tell which methods there are."""
    return hasattr(cls, "__getattr__")


def _annotated_result(function: Callable[..., Any]) -> type | None:
    found = call_foreign(lambda: inspect.signature(function, eval_str=True).return_annotation)
    if isinstance(found, Raised) or not isinstance(found.value, type):
        return None
    # A contract as the annotation says what it should be, and nothing of what it is.
    empty = found.value is inspect.Signature.empty or Protocol in found.value.__bases__
    return None if empty else found.value


def _parameters(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    shown = [
        parameter.replace(annotation=parameter.empty)
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    return str(signature.replace(parameters=shown, return_annotation=signature.empty))


def _name(item: Any) -> str:
    return f"{getattr(item, '__module__', '?')}.{getattr(item, '__qualname__', type(item).__qualname__)}"
