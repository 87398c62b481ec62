"""`python -m tests.suite.changed`: the quick unit tests of changed code, for `make check`.

Changed code: files that differ from the merge base with main, committed or not. Its tests: changed test files, and the
test files that import a changed module directly or through `tests/kit` and a `conftest.py`. Tests of real processes
and of the chart are named and left to `make test`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("tests/unit", "tests/contract", "benchmarks")
"""Folders of tests that run in seconds."""
WITHIN_S = 40
"""No test begins later; the tests that were not reached are named."""
_OUT_OF_TIME = pytest.ExitCode.INTERRUPTED
_ENGINE = ("tests/unit/vllm_plugin/", "tests/unit/torture/", "benchmarks/")
"""Importing vLLM takes these tests longer than most others run: they need a change in the plugin or in themselves."""


def main() -> int:
    """Run the tests of changed code; return pytest's exit status."""
    changed = changed_files()
    tests = sorted(select(changed, ROOT))
    others = sorted(file for file in changed if _is_test(Path(file)) and file not in tests)
    if others:
        print("left to `make test`:", *others)
    if not tests:
        print("no unit test imports the changed files")
        return 0
    print(f"{len(tests)} test files of {len(changed)} changed files", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--ff", "-m", "not thorough", "-p", "tests.suite.plugin"]
    command += ["--stop-at", str(time.time() + WITHIN_S), "-n", "2", "--dist", "loadfile", *tests]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0 if status in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED, _OUT_OF_TIME} else status


def changed_files() -> list[str]:
    """Return the files that differ from the merge base with main, with files that git does not know yet."""
    base = _git("merge-base", "HEAD", "main") or _git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    return sorted({*_git("diff", "--name-only", *base), *_git("ls-files", "--others", "--exclude-standard")})


def select(changed: Iterable[str], root: Path) -> set[str]:
    """Return the test files in `PLACES` that are changed, or that import a changed file."""
    changed = set(changed)
    modules = {_module(Path(file)) for file in changed if file.endswith(".py")}
    files = {str(file.relative_to(root)): file for place in PLACES for file in (root / place).rglob("*.py")}
    shared = {str(file.relative_to(root)): file for file in (root / "tests" / "kit").rglob("*.py")}
    imports = {name: set(_imports(file)) for name, file in (files | shared).items()}
    # Kits and contracts pass a change on to the tests that import them.
    while more := {
        module
        for name, found in imports.items()
        if not _is_test(Path(name)) and found & modules and (module := _module(Path(name))) not in modules
    }:
        modules |= more
    is_engine = any(file.startswith(("vllm_plugin/", "integrations/", *_ENGINE)) for file in changed)
    folders = {
        str(Path(name).parent) for name in files if name.endswith("conftest.py") and _module(Path(name)) in modules
    }
    return {
        name
        for name in files
        if _is_test(Path(name))
        and (is_engine or not name.startswith(_ENGINE))
        and (name in changed or imports[name] & modules or any(_is_below(name, folder) for folder in folders))
    }


def _imports(file: Path) -> Iterator[str]:
    """Yield every module that a file may import: of `from a import b` both `a` and `a.b`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_test(file: Path) -> bool:
    return file.name.startswith("test_") and file.suffix == ".py"


def _is_below(name: str, folder: str) -> bool:
    return name.startswith(f"{folder}/")


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


if __name__ == "__main__":
    sys.exit(main())
