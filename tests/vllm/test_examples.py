"""The examples do what they show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(command, stack):
    ended = subprocess.run(
        command, env=os.environ | {"URL": stack.url}, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_curl_example_runs_and_computes_one_token_the_second_time(client):
    created, again, appended, deleted = run([str(EXAMPLES / "curl.sh")], client.stack).strip().splitlines()

    assert '"prompt_tokens": 5' in created
    assert '"prompt_tokens": 1' in again
    assert '"committed": true' in appended
    assert "success" in deleted


@pytest.mark.thorough
def test_the_openai_example_talks_about_capitals_and_computes_only_what_is_new(client):
    said = run([sys.executable, str(EXAMPLES / "openai_chat.py")], client.stack)

    assert "Paris" in said
    assert said.count("computed") == 2
