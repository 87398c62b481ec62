"""README's Python, the guides' and the examples pass the type checkers that users have, as strictly as they go."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PAGES = ("README.md", "deploy/client/README.md", "docs/sdks/python.md", "docs/reference/python.md")
CHECKS = """
from contextcache.client import Context, Divergence, Usage

def read(context: Context) -> None:
    usage: Usage = context.reply.usage
    saved: int | None = usage.context.saved_ms
    left: Divergence | None = usage.context.diverged
    print(saved, left)
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder with every example as a file of its own."""
    folder = tmp_path_factory.mktemp("programs")
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
        assert blocks, page
        name = re.sub(r"\W", "_", page)
        # A page's later blocks go on with names of the earlier ones.
        (folder / f"{name}.py").write_text("".join(blocks))
    for example in (ROOT / "examples").glob("*.py"):
        if "contextcache" in example.read_text():
            (folder / example.name).write_text(example.read_text())
    (folder / "typed.py").write_text(CHECKS)
    return folder


def ran(*command, **environment):
    told = os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, check=False, timeout=150)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.thorough  # half a minute of CPU; pyright's run is the quick one
def test_mypy_finds_nothing(programs):
    """Seen to fail with a `usage.context` that may be None."""
    cache = ROOT / ".build" / "mypy-programs"
    code, said = ran(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", cache, programs)

    assert code == 0, said


def test_pyright_finds_nothing(programs):
    """Seen to fail with a `usage.context` that may be None."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    command = [BIN / "pyright", "--outputjson", "--pythonpath", sys.executable, programs]
    _, said = ran(*command, PATH=path, PYRIGHT_PYTHON_GLOBAL_NODE="on", PYRIGHT_PYTHON_IGNORE_WARNINGS="1")
    found = json.loads(said)

    assert found["summary"]["filesAnalyzed"] == len([*programs.glob("*.py")])
    assert found["generalDiagnostics"] == []
