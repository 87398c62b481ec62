"""`python -m deploy.docs`: write what pages take from code and from results; with `--check`, fail when one is stale."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from deploy.docs.blocks import filled
from deploy.docs.commands import commands
from deploy.docs.errors import errors_table
from deploy.docs.figures import figures
from deploy.docs.http import http_reference
from deploy.docs.metrics import metrics_list
from deploy.docs.modules import modules_table
from deploy.docs.parts import parts_table
from deploy.docs.settings import settings_list
from deploy.docs.states import states_diagram

ROOT = Path(__file__).resolve().parents[2]
_WRITERS: Mapping[str, Callable[[str], str]] = {
    "commands": commands,
    "errors": errors_table,
    "http": http_reference,
    "metrics": metrics_list,
    "modules": modules_table,
    "parts": parts_table,
    "settings": settings_list,
    "states": states_diagram,
}


def written() -> Mapping[Path, str]:
    """Return the text of each page that has marked places, as it should be."""
    pages = [ROOT / "README.md", ROOT / "tests/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {page: page.read_text() for page in pages}
    return {page: filled(text, partial(_write, page)) for page, text in texts.items() if "<!-- generated: " in text}


def _write(page: Path, kind: str, name: str) -> str:
    if kind == "figures":
        return figures(name, "" if page.parent == ROOT else f"{os.path.relpath(ROOT, page.parent)}/")
    return _WRITERS[kind](name)


def main() -> None:
    """Write, or check; exit 1 when a page is stale."""
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(f"usage: python -m deploy.docs [--check]\n{__doc__}")
    stale = [page for page, text in written().items() if page.read_text() != text]
    if check and stale:
        sys.exit("stale, run python -m deploy.docs: " + ", ".join(str(page.relative_to(ROOT)) for page in stale))
    for page in stale:
        page.write_text(written()[page])
    print("\n".join(f"written: {page.relative_to(ROOT)}" for page in stale) or "up to date")


if __name__ == "__main__":
    main()
