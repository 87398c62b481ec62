"""`make lines`: count the lines of each package by kind; `BASE=<commit>` prints the change since that commit.

Code is every line that is not blank, not a comment of its own and not in a docstring. Generated files do not count.
Lines of Lua scripts, YAML templates, API documents, console scripts and TypeScript stand in a table of their own.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROOF = ("benchmarks", "examples", "tests")
DATA = (".j2", ".js", ".lua", ".ts", ".yaml", ".yml")
"""Kinds of files inside product packages that hold rules beside Python."""
_GENERATED = ("_pb2.py", "_pb2_grpc.py", "typescript/src/api.ts")


class Lines(NamedTuple):
    """Lines of a file or of several files."""

    code: int = 0
    comment: int = 0
    docstring: int = 0
    blank: int = 0


def counted(text: str) -> Lines:
    """Count the lines of a Python file by kind."""
    lines = text.splitlines()
    blank = {number for number, line in enumerate(lines, 1) if not line.strip()}
    docstring = set(_docstring_lines(text)) - blank
    comment = set(_comment_lines(text)) - docstring - blank
    code = len(lines) - len(blank | docstring | comment)
    return Lines(code, len(comment), len(docstring), len(blank))


def _docstring_lines(text: str) -> Iterator[int]:
    """Yield lines of literals that are statements: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _comment_lines(text: str) -> Iterator[int]:
    """Yield lines that hold a comment and nothing else."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            yield token.start[0]


def total(files: Iterable[tuple[str, str]]) -> dict[str, Lines]:
    """Add up the lines of Python files by top-level folder."""
    sums: dict[str, list[Lines]] = defaultdict(list)
    for name, text in files:
        if name.endswith(".py") and "/" in name and not name.endswith(_GENERATED):
            sums[name.split("/")[0]].append(counted(text))
    return {package: Lines(*map(sum, zip(*lines, strict=True))) for package, lines in sorted(sums.items())}


def data(files: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Count the lines, without blanks, of rules that are not Python, by package and suffix."""
    sums = Counter[str]()
    for name, text in files:
        package, suffix = name.split("/")[0], Path(name).suffix
        is_product = (ROOT / package / "__init__.py").exists() and package not in PROOF
        if suffix in DATA and is_product and not name.endswith(_GENERATED):
            sums[f"{package} {suffix}"] += sum(bool(line.strip()) for line in text.splitlines())
    return dict(sorted(sums.items()))


def checked_out() -> dict[str, str]:
    """Return the tracked and new text files of the working tree."""
    names = _git("ls-files", "--cached", "--others", "--exclude-standard").decode().splitlines()
    return {name: (ROOT / name).read_text() for name in names if _wanted(name) and (ROOT / name).is_file()}


def committed(ref: str) -> dict[str, str]:
    """Return the text files of a commit."""
    with tarfile.open(fileobj=io.BytesIO(_git("archive", ref))) as tar:
        wanted = (member for member in tar if member.isfile() and _wanted(member.name))
        return {member.name: file.read().decode() for member in wanted if (file := tar.extractfile(member))}


def _wanted(name: str) -> bool:
    return Path(name).suffix in {".py", *DATA}


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def main() -> None:
    """Print both tables."""
    now = checked_out()
    base = committed(sys.argv[1]) if sys.argv[1:] else None
    after, before = total(now.items()), total(base.items()) if base else {}
    head = [*Lines._fields, *(["    change of code"] if base else [])]
    print(f"{'package':18}" + "".join(f"{kind:>11}" for kind in head))
    for title, packages in (("product", [p for p in after if p not in PROOF]), ("proof", PROOF)):
        rows = {package: after[package] for package in packages if package in after}
        rows[f"{title}, sum"] = Lines(*map(sum, zip(*rows.values(), strict=True)))
        before[f"{title}, sum"] = Lines(sum(before.get(package, Lines()).code for package in packages))
        for package, lines in rows.items():
            change = f"{lines.code - before.get(package, Lines()).code:+19}" if base else ""
            print(f"{package:18}" + "".join(f"{number:11}" for number in lines) + change)
    old = data(base.items()) if base else {}
    print("\nlines of other rules, without blanks")
    for name, number in data(now.items()).items():
        print(f"{name:24}{number:5}" + (f"{number - old.get(name, 0):+19}" if base else ""))


if __name__ == "__main__":
    main()
