"""A third party's channel: the page for authors shows it as it is, and the kit proves it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kvferry.testing.fake_distributions import fake_distribution
from tests import commands

ROOT = Path(__file__).parents[2]
ACME = Path(__file__).parent / "acme_socket"
PAGE = (ROOT / "docs/write-a-channel.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SHOWN = dict(re.findall(r"^`([\w./]+)`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
FILES = sorted(str(path.relative_to(ACME)) for path in ACME.rglob("*.*") if path.suffix in (".py", ".toml"))
(REPORT,) = (text for _, text in BLOCKS if text.startswith("tests/"))


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith("__init__.py")])
def test_every_file_of_the_channel_stands_on_its_page(name: str) -> None:
    assert SHOWN.get(name) == (ACME / name).read_text(encoding="utf-8")


def test_the_channel_s_page_shows_no_code_that_is_not_the_example_s() -> None:
    code = [text for language, text in BLOCKS if language != "text"]
    assert sorted(code) == sorted(SHOWN.values())


def test_the_channel_s_folder_is_as_it_is_drawn() -> None:
    (drawn,) = (text for language, text in BLOCKS if language == "text" and text.startswith("acme_socket/"))
    names = set(re.findall(r"^ +([\w.]+\.\w+)", drawn, re.MULTILINE))
    assert names == {Path(name).name for name in FILES} | {"README.md"}


def test_it_passes_every_law_that_it_claims(tmp_path: Path) -> None:
    package = ACME / "src/acme_socket"
    fake_distribution(
        tmp_path,
        "acme-kvferry-socket",
        entry_points={"acme_socket": "acme_socket.plugin"},
        source={f"acme_socket/{path.name}": path.read_text() for path in package.glob("*.py")},
        offers={"channel.socket": "acme_socket"},
    )
    done = commands.call(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=ACME, without=("PYTEST",),
        environment={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for line in REPORT.splitlines():
        assert line in done.stdout.splitlines(), f"the page for authors shows {line!r}"
