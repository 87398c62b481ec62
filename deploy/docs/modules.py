"""The modules of a package as a table: path and first sentence of each docstring."""

from __future__ import annotations

import ast
from pathlib import Path

from deploy.docs.blocks import table

ROOT = Path(__file__).resolve().parents[2]
_GENERATED = ("/v1/", "/extproc/", "/_sync/")


def modules_table(package: str) -> str:
    """Return a row for each module of a package, the file to read first in bold."""
    rows: list[list[str]] = []
    for file in sorted((ROOT / package).rglob("*.py"), key=lambda file: (file.parent, file.name)):
        path = file.relative_to(ROOT).as_posix()
        purpose = _purpose(file)
        if purpose and not any(part in path for part in _GENERATED):
            name = f"[{path.removeprefix(f'{package}/')}](../{path})"
            rows.append([f"**{name}**" if "Read this first" in purpose else name, purpose])
    return table(["module", "purpose"], rows)


def _purpose(file: Path) -> str:
    """Return the first paragraph of a module's docstring as one line."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split())
