"""``kvferry live``: look at running instances of this host, and change them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from kvferry.api.units import UNLIMITED, parse_duration, parse_limit
from kvferry.cli.host import Host
from kvferry.cli.layout import wrapped
from kvferry.cli.live_output import cleared_text, instances_text, pins_text, quotas_text, status_text
from kvferry.cli.output import add_format, print_json
from kvferry.cli.sources import add_config, sources_of
from kvferry.compat import ExitCode
from kvferry.data.questions import (
    Answer,
    AskClear,
    AskPins,
    AskQuotas,
    AskStatus,
    Cleared,
    ExtendPin,
    ForgetQuota,
    Pins,
    Question,
    Quotas,
    ReleasePin,
    SetQuota,
    Status,
)
from kvferry.runtime.address import runtime_root
from kvferry.runtime.examination import fault_text
from kvferry.runtime.instances import ANSWER_SECONDS, Instance, ask, choose_instance, find_instances
from kvferry.runtime.startup import Reading, read

SCHEMA_VERSION = 1
CLEAR_SECONDS = 120.0
"""A clear or a lowered quota is worked off in slices between everything else."""


class LiveCommand:
    """Talks to instances over the private folder where their sides meet. Only their own user can."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def configure(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
        self._action(actions, "list", "list the instances of this host, dead ones included")
        status = self._action(actions, "status", "show an instance's tiers: slots, counters, health")
        status.add_argument("instance", nargs="?", metavar="INSTANCE", help=_INSTANCE)
        clear = self._action(actions, "clear", "remove chunks from an instance")
        _add_instance(clear)
        models = clear.add_mutually_exclusive_group()
        models.add_argument("--model", metavar="NAME", help="only chunks of this LoRA adapter")
        models.add_argument(
            "--base-model",
            action="store_const",
            const="",
            dest="model",
            help="only chunks of the served base model",
        )
        clear.add_argument("--salt", help="only chunks of this cache salt; '' means requests without one")
        clear.add_argument("--tier", metavar="NAME", help="only this tier (default: all of them)")
        self._configure_quota(actions)
        self._configure_pins(actions)

    def _configure_quota(self, actions: Any) -> None:
        quota = actions.add_parser("quota", help="show and change how much an owner may hold")
        steps = quota.add_subparsers(dest="step", metavar="STEP", title="steps", required=True)
        show = self._action(steps, "list", "show quotas and what owners hold")
        _add_instance(show)
        change = self._action(steps, "set", "give an owner (a cache salt) a quota, or all others")
        _add_instance(change)
        change.add_argument("owner", nargs="?", metavar="OWNER", help="the owner; '' owns without a salt")
        change.add_argument("size", nargs="?", metavar="SIZE", help="such as 4GiB, or 'unlimited'")
        change.add_argument(
            "--default", metavar="SIZE", help="instead: what each owner without a quota of its own may hold"
        )
        forget = self._action(steps, "forget", "let the default apply to an owner again")
        _add_instance(forget)
        forget.add_argument("owner", metavar="OWNER")
        for step in (show, change, forget):
            step.add_argument("--tier", metavar="NAME", help="of this tier (default: the first one)")

    def _configure_pins(self, actions: Any) -> None:
        pins = actions.add_parser("pins", help="show and change what is pinned")
        steps = pins.add_subparsers(dest="step", metavar="STEP", title="steps", required=True)
        _add_instance(self._action(steps, "list", "show every pin, how long it lasts, how much it covers"))
        extend = self._action(steps, "extend", "let a pin last at least so long from now")
        release = self._action(steps, "release", "end a pin now")
        for step in (extend, release):
            _add_instance(step)
            step.add_argument("name", metavar="NAME")
            step.add_argument("--salt", help="only the pin of this cache salt")
        extend.add_argument("duration", metavar="DURATION", help="such as 10min or 2h")

    def _action(self, actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(
            name, help=summary, description=summary, allow_abbrev=False
        )
        add_config(parser)
        parser.add_argument(
            "--runtime-dir",
            metavar="DIR",
            help="where to look for instances (default: the configuration's runtime_dir)",
        )
        add_format(parser)
        parser.set_defaults(usage=parser.error)
        return parser

    def run(self, arguments: argparse.Namespace) -> int:
        """0, or 2 with faults of the configuration: nothing is asked then. Raises
        :class:`kvferry.api.KVFerryError` when an instance refuses or does not answer."""
        folder: str | None = arguments.runtime_dir
        if folder is None:
            reading = read(sources_of(arguments.config, self._host), distributions=self._host.distributions)
            if reading.config is None:
                # Another folder would show, and change, instances that were not meant.
                return self._refuse(reading)
            folder = reading.config.runtime_dir
        root = runtime_root(folder, self._host.environment)
        if arguments.action == "list":
            return _list(root, arguments.format)
        question, expected, seconds = _question(arguments)
        instance = choose_instance(root, arguments.instance)
        answer = ask(instance, question, expected, seconds)
        if arguments.format == "json":
            print_json({"schema": SCHEMA_VERSION, **_instance_json(instance), **msgspec.to_builtins(answer)})
        else:
            print(_text(answer))
        return int(ExitCode.CLEAN)

    def _refuse(self, reading: Reading) -> int:
        for label, faults in (
            ("error[config]", reading.config_faults),
            ("error[plugin]", reading.plugin_faults),
        ):
            for fault in faults:
                print(wrapped(fault_text(label, fault), self._host.columns), file=sys.stderr)
        print(
            f"{reading.name}: nothing was asked, because the configuration has faults; "
            "--runtime-dir DIR does without one",
            file=sys.stderr,
        )
        return int(ExitCode.ERRORS)


_INSTANCE = "name or id, as 'kvferry live list' shows it (default: the only one)"


def _add_instance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instance", metavar="INSTANCE", help=_INSTANCE)


def _list(root: Path, form: str) -> int:
    found = find_instances(root)
    if form == "json":
        print_json({"schema": SCHEMA_VERSION, "instances": [_instance_json(instance) for instance in found]})
    else:
        print(instances_text(found, root))
    return int(ExitCode.CLEAN)


def _instance_json(instance: Instance) -> dict[str, Any]:
    card = instance.card
    return {
        "instance": instance.name,
        "id": instance.id,
        "alive": instance.alive,
        "pid": None if card is None else card.pid,
        "version": None if card is None else card.version,
        "tiers": [] if card is None else list(card.tiers),
    }


def _question(arguments: argparse.Namespace) -> tuple[Question, type[Answer], float]:
    action, step = arguments.action, getattr(arguments, "step", None)
    if action == "status":
        return AskStatus(), Status, ANSWER_SECONDS
    if action == "clear":
        return AskClear(arguments.model, arguments.salt, arguments.tier), Cleared, CLEAR_SECONDS
    if action == "quota":
        if step == "list":
            return AskQuotas(arguments.tier), Quotas, ANSWER_SECONDS
        if step == "forget":
            return ForgetQuota(arguments.owner, arguments.tier), Quotas, CLEAR_SECONDS
        return _set_quota(arguments), Quotas, CLEAR_SECONDS
    if step == "list":
        return AskPins(), Pins, ANSWER_SECONDS
    if step == "release":
        return ReleasePin(arguments.name, arguments.salt), Pins, ANSWER_SECONDS
    try:
        seconds = parse_duration(arguments.duration)
    except ValueError as error:
        arguments.usage(str(error))
        raise
    return ExtendPin(arguments.name, seconds, arguments.salt), Pins, ANSWER_SECONDS


def _set_quota(arguments: argparse.Namespace) -> SetQuota:
    named = arguments.owner is not None and arguments.size is not None
    if named == (arguments.default is not None) or (arguments.owner is not None and not named):
        arguments.usage("give OWNER and SIZE, or --default SIZE")
    text = arguments.size if named else arguments.default
    try:
        limit = parse_limit(text)
    except ValueError as error:
        arguments.usage(str(error))
        raise
    quota = None if limit == UNLIMITED else limit
    return SetQuota(arguments.owner if named else None, quota, arguments.tier)


def _text(answer: Answer) -> str:
    match answer:
        case Status():
            return status_text(answer)
        case Cleared():
            return cleared_text(answer)
        case Quotas():
            return quotas_text(answer)
        case Pins():
            return pins_text(answer)
