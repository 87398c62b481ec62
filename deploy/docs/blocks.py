"""The marked places of a page, their text put in, and tables. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

_BLOCK = re.compile(r"(<!-- generated: (\w+)(?: (\S+))? -->)(.*?)(<!-- /generated -->)", re.DOTALL)


def filled(page: str, write: Callable[[str, str], str]) -> str:
    """Return the page with every marked place filled by `write(kind, name)`. A text of several lines is set apart."""

    def fill(found: re.Match[str]) -> str:
        text = write(found[2], found[3] or "")
        return found[1] + (f"\n\n{text}\n\n" if "\n" in text else text) + found[5]

    return _BLOCK.sub(fill, page)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown. A bar in a cell stays a bar."""
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
