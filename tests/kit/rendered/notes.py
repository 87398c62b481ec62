"""The commands that NOTES.txt prints, run by a shell.

As printed, but for the address that a port-forward would have given, and the session's id where they say `ctx_…`.
`kubectl` is a stand-in that shows Secrets of the release; a name in a certificate leads to the front by .curlrc.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.chart.manifests import name_of, of_kind
from tests.kit.rendered.front import Front
from tests.kit.rendered.installation import Installation

_SHELL_S = 300.0
_FORWARDED = "localhost:8000"
_KUBECTL = """#!{python}
import json, re, sys
if "secret" in sys.argv:
    path = sys.argv[-1].removeprefix("jsonpath=")
    key = re.fullmatch(r"\\{{\\.data\\.(.+)\\}}", path)[1].replace("\\\\.", ".")
    print(json.load(open({secrets!r}))[sys.argv[sys.argv.index("secret") + 1]][key], end="")
else:
    assert "port-forward" in sys.argv, sys.argv
"""


def notes_commands(made: Installation) -> tuple[str, list[str]]:
    """Return what sets the variables, and the calls of curl after it."""
    script = "\n".join(line.strip() for line in made.notes.splitlines() if line.startswith(" " * 5))
    first, *calls = re.split(r"^(?=curl )", script.replace("\\\n", ""), flags=re.MULTILINE)
    return first, calls


def run_notes(made: Installation, front: Front, ca: bytes, folder: Path) -> list[dict[str, Any]]:
    """Return the answers of the three calls."""
    first, calls = notes_commands(made)
    env = _surroundings(made, front, ca, folder)
    where = f"{front.name}:443" if front.name else front.address
    answers: list[dict[str, Any]] = []
    for call in calls:
        session_id = answers[0]["session_id"] if answers else ""
        script = (first + call).replace(_FORWARDED, where).replace("ctx_…", session_id)
        command = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_SHELL_S, check=False)
        assert done.returncode == 0, (script, done.stderr)
        answers.append(json.loads(done.stdout))
    return answers


def _surroundings(made: Installation, front: Front, ca: bytes, folder: Path) -> dict[str, str]:
    secrets = {name_of(found): found["data"] for found in of_kind(made.documents, "Secret")}
    (folder / "secrets.json").write_text(json.dumps(secrets))
    kubectl = folder / "kubectl"
    kubectl.write_text(_KUBECTL.format(python=sys.executable, secrets=str(folder / "secrets.json")))
    kubectl.chmod(0o755)
    if front.name:
        (folder / "ca.crt").write_bytes(ca)
        rules = [f'connect-to = "{front.name}:443:{front.address}"', f'cacert = "{folder / "ca.crt"}"']
        (folder / ".curlrc").write_text("\n".join(rules))
    return {"PATH": f"{folder}:{os.environ['PATH']}", "CURL_HOME": str(folder), "HOME": str(folder)}
