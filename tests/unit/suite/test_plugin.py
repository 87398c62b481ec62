"""The suite's plugin of pytest: a run that is out of time names the tests that it did not reach; a shard is a part."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILE = """
import pytest

def test_one(): pass

@pytest.mark.parametrize("case", [1, 2, 3])
def test_two(case): pass
"""


@pytest.fixture
def said(tmp_path):
    """Return what pytest prints about a file of four tests, run with the plugin and some options."""

    def run(*options):
        (tmp_path / "test_few.py").write_text(FILE)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.suite.plugin", "-p", "no:randomly", *options]
        files = ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", "-p", "no:cacheprovider", str(tmp_path)]
        return subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False).stdout

    return run


def test_the_tests_that_a_run_did_not_reach_are_named(said):
    told = said("--stop-at", "1")

    assert "out of time: 3 tests were not reached" in told
    assert "test_few.py::test_two (3)" in told


def test_a_shard_is_a_part_of_the_chosen_tests(said):
    assert "2 passed, 2 deselected" in said("--shard", "1/2")
