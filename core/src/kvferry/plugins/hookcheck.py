"""Faults of a plugin's hooks, found before pluggy sees the plugin."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import frozen

from kvferry.api import PROJECT, KVFerryHooks
from kvferry.plugins.hints import closest, one_of

HOOK_PREFIX = f"{PROJECT}_"
_MARK = f"{PROJECT}_impl"


@frozen
class HookFault:
    """What is wrong with one hook, in one sentence, and what its author does about it."""

    what: str
    fix: str


def hook_names() -> tuple[str, ...]:
    """Names of all hooks of the contract, sorted."""
    return tuple(sorted(name for name in vars(KVFerryHooks) if name.startswith(HOOK_PREFIX)))


def _accepted_arguments(hook: str) -> tuple[str, ...]:
    return tuple(inspect.signature(vars(KVFerryHooks)[hook]).parameters)[1:]


def hook_faults(plugin: object) -> tuple[HookFault, ...]:
    """The faults of the hooks of ``plugin``, a module as a rule.

    A hook that is misspelt, not marked, marked as a wrapper, asynchronous, or takes an argument that
    the contract does not hand over would be ignored or fail much later. May raise what the plugin's
    own attributes raise.
    """
    faults: list[HookFault] = []
    for attribute, value, options in _hooklike(plugin):
        hook = attribute if options is None else options.get("specname") or attribute
        if hook not in hook_names():
            close = closest(hook, hook_names())
            hint = f"did you mean {close!r}?" if close else f"hooks are {one_of(hook_names())}"
            fix = f"rename {attribute!r} to {close!r}" if close else f"rename or remove {attribute!r}"
            faults.append(HookFault(f"{attribute!r} implements no hook of the contract; {hint}", fix))
        elif options is None:
            what = f"{attribute!r} is not marked with @kvferry.api.hookimpl"
            faults.append(HookFault(what, f"write  @hookimpl  above {attribute!r}"))
        else:
            signature = f"({', '.join(_accepted_arguments(hook))})"
            fix = f"write it as  def {hook}{signature}"
            faults += [HookFault(what, fix) for what in _shape_faults(attribute, hook, value, options)]
    return tuple(faults)


def hook_functions(plugin: object) -> Mapping[str, Callable[..., Any]]:
    """The marked functions of a plugin without faults, by attribute."""
    return {attribute: value for attribute, value, options in _hooklike(plugin) if options is not None}


def _hooklike(plugin: object) -> Iterator[tuple[str, Any, dict[str, Any] | None]]:
    """Routines that are marked as hooks or whose name says that they should be."""
    for attribute in dir(plugin):
        value = inspect.getattr_static(plugin, attribute)
        if not inspect.isroutine(value):
            continue
        options = getattr(value, _MARK, None)
        if isinstance(options, dict):
            yield attribute, value, options
        elif attribute.startswith(HOOK_PREFIX):
            yield attribute, value, None


def _shape_faults(attribute: str, hook: str, value: Any, options: dict[str, Any]) -> Iterator[str]:
    if options.get("wrapper") or options.get("hookwrapper"):
        yield f"{attribute!r} is a wrapper; hooks only describe, so there is nothing to wrap"
        return
    if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value):
        yield f"{attribute!r} is asynchronous; hooks are called plainly"
        return
    parameters = inspect.signature(value).parameters.values()
    accepted = _accepted_arguments(hook)
    shown = f"({', '.join(accepted)})"
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield f"{attribute!r} takes {parameter}; its signature is {hook}{shown}"
        elif parameter.kind is parameter.KEYWORD_ONLY:
            yield (f"{attribute!r} takes {parameter.name!r} as keyword only; its signature is {hook}{shown}")
        elif parameter.name not in accepted and parameter.default is parameter.empty:
            yield (
                f"{attribute!r} wants {parameter.name!r}, which is not handed over; its signature "
                f"is {hook}{shown}"
            )
