"""``kvferry doctor``."""

from __future__ import annotations

import argparse
import sys

from kvferry import __version__
from kvferry.api import API_VERSION, Fact, Facts
from kvferry.cli.host import Host
from kvferry.cli.layout import wrapped
from kvferry.cli.output import plugin_json, plugins_text, print_json, table
from kvferry.cli.sources import add_config, environment_of, sources_of
from kvferry.compat import ExitCode
from kvferry.compat.facts_file import description_text
from kvferry.compat.rendering import plain
from kvferry.compat.values import size_text
from kvferry.plugins import BUILTIN_NAME
from kvferry.runtime.catalogue import catalogue_of
from kvferry.runtime.examination import fault_json, fault_text
from kvferry.runtime.startup import examine

_MORE_FACTS = "Plugins may know more facts"


class DoctorCommand:
    """Shows what kvferry finds on this machine, and where it looked."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def configure(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser)
        parser.add_argument(
            "--format",
            choices=("text", "json", "facts"),
            default="text",
            help="facts: a file for 'kvferry check --facts' on another machine (default: text)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """0, or 2 with faults of the configuration, or 4 with a plugin that cannot be used.

        Rules are not judged here: that is what ``kvferry check`` is for.
        """
        found = examine(
            sources_of(arguments.config, self._host),
            environment_of(self._host),
            distributions=self._host.distributions,
        )
        host_facts = [fact for path, fact in sorted(found.facts.items()) if _about_host(path, found.facts)]
        copies, why = _copies(found.facts)
        unlisted = [record.name for record in found.plugins.records if not record.listed]
        unlisted = [name for name in unlisted if name != BUILTIN_NAME]
        if arguments.format == "facts":
            print(description_text(found.facts, catalogue_of([found.plugins])), end="")
            if unlisted:
                print(f"\n# {_MORE_FACTS}, and not listed are: {', '.join(unlisted)}.")
                print("# 'kvferry doctor --config FILE --format facts' adds those of the plugins in FILE.")
            for fault in (*found.config_faults, *found.plugin_faults):
                print(wrapped(fault_text("error", fault), self._host.columns), file=sys.stderr)
        elif arguments.format == "json":
            print_json(
                {
                    "kvferry": __version__,
                    "api": API_VERSION,
                    "copies": {"with": copies, "why": why},
                    "facts": [
                        {"path": fact.path, "value": plain(fact.value), "origin": fact.origin}
                        for fact in host_facts
                    ],
                    "plugins": [plugin_json(record) for record in found.plugins.records],
                    "config_faults": [fault_json(fault) for fault in found.config_faults],
                    "plugin_faults": [fault_json(fault) for fault in found.plugin_faults],
                }
            )
        else:
            lines = [
                f"kvferry {__version__}, plugin API {API_VERSION}",
                f"copies are made by {copies}: {why}",
                "",
                *table([("FACT", "VALUE", "ORIGIN"), *(row for fact in host_facts for row in _rows(fact))]),
                "",
                plugins_text(found.plugins.records),
            ]
            if unlisted:
                lines.append(f"{_MORE_FACTS}: 'kvferry doctor --config FILE' asks those that FILE lists.")
            for label, faults in (
                ("error[config]", found.config_faults),
                ("error[plugin]", found.plugin_faults),
            ):
                for fault in faults:
                    lines += ["", fault_text(label, fault)]
            print(wrapped("\n".join(lines), self._host.columns))
        if found.plugin_faults:
            return int(ExitCode.BROKEN_PLUGIN)
        return int(ExitCode.ERRORS if found.config_faults else ExitCode.CLEAN)


def _about_host(path: str, facts: Facts) -> bool:
    """Probed facts only: what the configuration says is shown by ``kvferry config show``."""
    return facts[path].origin.startswith("probe") or path.startswith("kvferry.")


def _copies(facts: Facts) -> tuple[str, str]:
    available, why = facts.get("native.available"), facts.get("native.why")
    name = "native code" if available is not None and available.value else "NumPy"
    return name, str(why.value) if why is not None else "nothing is known of native code"


def _rows(fact: Fact) -> list[tuple[str, str, str]]:
    """One row, or one for each text of a list."""
    shown = str(fact.value)
    if fact.path.endswith("_bytes") and isinstance(fact.value, int):
        shown = f"{fact.value} ({size_text(fact.value)})"
    if not isinstance(fact.value, tuple) or not fact.value:
        return [(fact.path, shown, fact.origin)]
    first, *others = fact.value
    return [(fact.path, str(first), fact.origin), *(("", str(other), "") for other in others)]
