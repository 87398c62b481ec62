"""Links of pages outside docs/ lead to files and headings that exist; `mkdocs build --strict` checks those in docs/."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()
    if (ROOT / name).exists() and not name.startswith(("changes/", "docs/"))
)  # fmt: skip
LINK = re.compile(r"\[[^\]\n]*(?:\n[^\]\n]*)?\]\(([^()\s]+)\)")


def text_of(page: Path) -> str:
    """Return a page without its blocks and spans of code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)) for heading in headings)
    return {heading.strip().lower().replace(" ", "-") for heading in plain}


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / unquote(path)).resolve() if path else page
    return target.exists() and (not anchor or target.is_dir() or anchor in anchors(target))


def test_every_link_leads_somewhere():
    """Seen to fail with a file's name misspelt, and with an anchor of another page."""
    links = [(page, link) for page in PAGES for link in LINK.findall(text_of(page)) if not re.match(r"[a-z]+:", link)]

    assert len(PAGES) > 5
    assert len(links) > 30
    assert [(page.name, link) for page, link in links if not leads_somewhere(page, link)] == []
