"""The examples do what they show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.stack import KEY

pytestmark = pytest.mark.timeout(600)
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(command, stack):
    ended = subprocess.run(
        command,
        env=os.environ | {"CONTEXT_CACHE_URL": stack.url, "CONTEXT_CACHE_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_curl_example_runs_and_computes_one_token_the_second_time(client):
    created, again, appended, deleted = run([str(EXAMPLES / "curl.sh")], client.stack).strip().splitlines()

    assert '"prompt_tokens": 5' in created
    assert '"prompt_tokens": 1' in again
    assert '"committed": true' in appended
    assert "success" in deleted


def test_the_client_example_computes_only_what_is_new(client):
    said = run([sys.executable, str(EXAMPLES / "client.py")], client.stack)

    computed = [int(line.split()[1].rstrip(",")) for line in said.splitlines() if line.startswith("  computed")]
    assert len(computed) == 2
    assert max(computed) < 40


def test_the_code_of_the_client_s_page_runs_as_it_stands(client):
    (code,) = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "docs/reference/python.md").read_text(), re.DOTALL)
    said = run([sys.executable, "-c", code.replace("http://127.0.0.1:8000", client.stack.url)], client.stack)

    assert "Finished(" in said


RUN_NOTEBOOK = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        print(output.get("text", ""), end="")
"""


@pytest.mark.thorough
def test_the_tour_runs_from_its_first_cell_to_its_last(client):
    said = run([sys.executable, "-c", RUN_NOTEBOOK, str(EXAMPLES / "tour.ipynb")], client.stack)

    assert "with the context" in said
    assert "saved" in said


@pytest.mark.thorough
def test_the_openai_example_talks_about_capitals_and_computes_only_what_is_new(client):
    said = run([sys.executable, str(EXAMPLES / "openai_chat.py")], client.stack)

    assert "Paris" in said
    assert said.count("computed") == 2
