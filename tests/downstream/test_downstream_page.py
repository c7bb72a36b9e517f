"""The page for authors shows the example as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ACME = Path(__file__).parent / "acme_lmdb"
PAGE = (Path(__file__).parents[2] / "docs/write-a-backend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SHOWN = dict(re.findall(r"^`([\w./]+)`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
FILES = sorted(str(path.relative_to(ACME)) for path in ACME.rglob("*.*") if path.suffix in (".py", ".toml"))


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith("__init__.py")])
def test_every_file_of_the_example_stands_on_the_page(name: str) -> None:
    assert SHOWN.get(name) == (ACME / name).read_text(encoding="utf-8")


def test_the_page_shows_no_code_that_is_not_the_example_s() -> None:
    code = [text for language, text in BLOCKS if language != "text"]
    assert sorted(code) == sorted(SHOWN.values())


def test_the_folder_is_as_it_is_drawn() -> None:
    (drawn,) = (text for language, text in BLOCKS if language == "text" and text.startswith("acme_lmdb/"))
    names = set(re.findall(r"^ +([\w.]+\.\w+)", drawn, re.MULTILINE))
    assert names == {Path(name).name for name in FILES} | {"README.md"}
