"""The examples do what they show, and so do the calls of the README."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.stack import KEY

pytestmark = pytest.mark.timeout(600)
EXAMPLES = Path(__file__).parents[2] / "examples"
README = (EXAMPLES.parent / "README.md").read_text()
EPOCH_S = 1_000_000_000
LOCAL = "http://127.0.0.1:8000"


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


@pytest.mark.thorough
def test_the_client_example_computes_only_what_is_new(client):
    said = run([sys.executable, str(EXAMPLES / "client.py")], client.stack)

    computed = [int(line.split()[1].rstrip(",")) for line in said.splitlines() if line.startswith("  computed")]
    assert len(computed) == 2
    assert max(computed) < 40


def test_the_code_of_the_client_s_page_runs_as_it_stands(client):
    (code,) = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "docs/reference/python.md").read_text(), re.DOTALL)
    said = run([sys.executable, "-c", code.replace("http://127.0.0.1:8000", client.stack.url)], client.stack)

    assert "Finished(" in said


def missing(shown, answer, where=""):
    """Return the places where an answer is not as a page shows it; `…`: anything. A float or a time: any number."""
    if isinstance(shown, dict):
        absent = [f"{where}.{name}" for name in shown if name not in answer and name != "…"]
        there = (name for name in shown if name in answer)
        return absent + [lost for name in there for lost in missing(shown[name], answer[name], f"{where}.{name}")]
    if shown == ["…"]:
        return [] if answer else [where]
    if isinstance(shown, str):
        is_same = re.fullmatch(re.escape(shown).replace("…", ".+"), str(answer))
    elif isinstance(shown, float) or (isinstance(shown, int) and shown > EPOCH_S):
        is_same = isinstance(answer, int | float)
    else:
        is_same = answer == shown
    return [] if is_same else [f"{where}: {answer!r}"]


def test_the_readme_s_calls_are_answered_as_it_shows(client):
    """Seen to fail with 2 computed tokens written where 3 are, and with a field that no answer has."""
    blocks = re.findall(r"```(?:sh|json)\n(.*?)```", README, re.DOTALL)
    calls = [(block, answer) for block, answer in itertools.pairwise(blocks) if block.startswith("curl")]
    session_id, lost = "", []

    for call, shown in calls:
        command = shlex.split(call.replace("\\\n", " ").replace(LOCAL, client.stack.url).replace("ctx_…", session_id))
        answer = json.loads(run(command, client.stack))
        session_id = answer.get("session_id", session_id)
        lost.append(missing(json.loads(shown), answer))

    assert lost == [[], [], []]


def test_the_readme_s_python_runs_as_it_stands(client):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    said = run([sys.executable, "-c", code.replace(LOCAL, client.stack.url)], client.stack)

    assert re.search(r"^\d+ tokens reused, \d computed$", said, re.MULTILINE)


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
