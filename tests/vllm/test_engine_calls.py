"""The list of vLLM's calls that the allow-list is held to is what this vLLM has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.engine_calls import SWITCHES, known_calls

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300
PROGRAM = "import json; from tests.kit.engine_calls import built_calls; print(json.dumps(built_calls()))"


@pytest.mark.thorough
def test_the_list_is_that_of_the_app_that_vllm_builds():
    """In a process of its own: vLLM reads its switches when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **SWITCHES, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    found = [tuple(call) for call in json.loads(done.stdout.splitlines()[-1])]

    assert found == known_calls()
