"""``kvferry docs``: reference pages, written from what the code says of itself."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator
from pathlib import Path

from kvferry.api import ENTRY_POINT_GROUP, ErrorKind, KVFerryError, Retry
from kvferry.cli.configuration_page import configuration_page
from kvferry.cli.host import Host
from kvferry.cli.rules_page import rules_page
from kvferry.plugins import LoadedPlugins, PluginRequest, load_plugins

STALE = 1


class DocsCommand:
    """Writes ``configuration.md`` and ``rules.md`` for core and the plugins that are named."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the pages are")
        parser.add_argument(
            "--tree",
            type=Path,
            metavar="PLUGINS",
            help="folder of plugin projects; each that has a pyproject.toml is included",
        )
        parser.add_argument(
            "--plugin",
            action="append",
            default=[],
            dest="page_plugins",
            metavar="NAME",
            help="include this plugin; may be given several times",
        )
        parser.add_argument(
            "--check", action="store_true", help=f"write nothing; end with {STALE} when a page is stale"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """0, or 1 with ``--check`` and a stale page. Raises :class:`KVFerryError` when a plugin cannot
        be used: its keys and rules would be missing without a word."""
        folder: Path = arguments.folder
        names = [*arguments.page_plugins]
        if arguments.tree is not None:
            names += plugins_in(arguments.tree)
        plugins = load_plugins(
            [PluginRequest.parse(name, origin="kvferry docs") for name in dict.fromkeys(names)],
            distributions=self._host.distributions,
        )
        plugins.raise_for_faults()
        stale = []
        for name, text in pages(plugins).items():
            path = folder / name
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(path)
                if not arguments.check:
                    folder.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="utf-8")
        for path in stale:
            print(f"{path}: {'stale' if arguments.check else 'written'}")
        return STALE if stale and arguments.check else 0


def pages(plugins: LoadedPlugins) -> dict[str, str]:
    """The text of each page by its file name."""
    return {"configuration.md": configuration_page(plugins), "rules.md": rules_page(plugins)}


def plugins_in(tree: Path) -> Iterator[str]:
    """Names of the plugins whose projects lie right below ``tree``, in the order of their folders."""
    projects = sorted(tree.glob("*/pyproject.toml"))
    if not projects:
        raise KVFerryError(
            f"no plugin project lies below {tree}",
            kind=ErrorKind.CONFIG,
            remedy="name the folder that holds one folder for each plugin",
            retry=Retry.AFTER_CHANGE,
        )
    for project in projects:
        declared = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        yield from declared.get("entry-points", {}).get(ENTRY_POINT_GROUP, {})
