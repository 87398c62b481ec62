"""Code blocks of the documentation: where they are, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "charts/context-cache/README.md",
                 *(ROOT / "docs").rglob("*.md"))
)  # fmt: skip
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str, pages: list[str] = PAGES) -> list[Block]:
    """Return the blocks of the pages in these languages, or in all, in their order."""
    return [block for page in pages for block in _of(page) if not languages or block.language in languages]


def _of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for found in _BLOCK.finditer(text):
        yield Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])


def commands(block: Block) -> list[str]:
    """Return the commands of a shell block: a line, and the lines that a quote or a backslash continues."""
    found, command = [], ""
    for line in block.text.splitlines():
        command = f"{command}\n{line}" if command else line
        try:
            is_whole = not line.endswith("\\") and shlex.split(command, comments=True) is not None
        except ValueError:
            is_whole = False
        if is_whole:
            found += [command] if shlex.split(command, comments=True) else []
            command = ""
    assert not command, f"{block}: no end of {command!r}"
    return found


def programs(command: str) -> list[list[str]]:
    """Return the programs that a command starts, also by pipes and `&&`, each with its arguments."""
    found: list[list[str]] = [[]]
    for word in shlex.split(command, comments=True):
        if word in {"|", "&&"}:
            found.append([])
        elif found[-1][-1:] != [">"]:
            found[-1].append(word)
    return [[word for word in line if word not in {">", "&"}] for line in found]
