"""Pages that lead through the code name files, functions and make targets that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GUIDES = ("README.md", "CONTRIBUTING.md", "docs/concepts/how-it-works.md", "tests/README.md")
FILE = r"`([\w./-]+\.(?:py|lua|proto|toml|json|yaml|txt))`"


def names_of(file: Path) -> set[str]:
    """Return what a module defines."""
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if hasattr(node, "name")}


def missing(text: str, folder: Path) -> list[str]:
    """Return the files and functions of a page that are not there.

    A bare file name is looked for beside a file that its section names, a function in one that its section names, and
    "`name()` of `file`" means that file.
    """
    lost = []
    for section in re.split(r"^#", text, flags=re.MULTILINE):
        files: list[Path] = []
        for name in re.findall(FILE, section):
            known = [
                path for path in (ROOT / name, folder / name, *(one.parent / name for one in files)) if path.exists()
            ]
            files += known[:1]
            lost += [] if known else [name]
        found = {file: names_of(file) for file in files if file.suffix == ".py"}
        for function, of in re.findall(rf"`(\w+)\(\)`(?:\s+of\s+{FILE})?", section):
            places = [found.get(ROOT / of, set())] if of else found.values()
            lost += [] if any(function in names for names in places) else [f"{function}() {of}"]
    return lost


@pytest.mark.parametrize("page", GUIDES)
def test_files_and_functions_that_a_guide_names_are_there(page):
    """Seen to fail with a function's name misspelt, and with a file that moved."""
    assert missing((ROOT / page).read_text(), (ROOT / page).parent) == []


def test_make_targets_that_pages_name_are_there():
    """Seen to fail with `make tests` written for `make test`."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests/README.md"]
    pages += [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "adr"]
    named = {
        (page.name, target)
        for page in pages
        for target in re.findall(r"(?:`|^)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE)
    }

    assert {name for name in named if name[1] not in targets} == set()


def test_the_map_of_the_tests_names_every_folder_of_them():
    """Its table of parts is generated. Seen to fail with `kit/` taken out."""
    text = (ROOT / "tests/README.md").read_text()
    folders = [path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("__")]

    assert [folder for folder in folders if f"{folder}/" not in text] == []
