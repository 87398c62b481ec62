"""Copies the plugin, and what it imports that vLLM's image may lack, to where vLLM's container will find it.

Runs in an init container of the injected pod, from our image. A copy is put in its place by a rename: a container that
was killed half-way leaves nothing that looks whole.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pod_injector import payload_start

SOURCE = Path("/opt/context-cache/payload")
"""In our image: packages for each CPython that vLLM runs on, side by side (deploy/docker/payload.txt)."""
START = "start"
"""Goes on PYTHONPATH."""
PACKAGES = "packages"
"""Appended to the search path by START/sitecustomize.py."""


def copy_payload(target: Path, *, source: Path = SOURCE) -> None:
    """Fill `target` with START and PACKAGES, in place of those of an earlier run. Raises OSError."""
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is missing: this image was built without the payload")
    start = Path(payload_start.__file__).with_name("sitecustomize.py")
    incoming = target / ".incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    shutil.copytree(source, incoming / PACKAGES, ignore=shutil.ignore_patterns("__pycache__"))
    (incoming / START).mkdir()
    shutil.copyfile(start, incoming / START / start.name)
    _let_everybody_read(incoming)
    for name in (PACKAGES, START):
        shutil.rmtree(target / name, ignore_errors=True)
        (incoming / name).rename(target / name)
    incoming.rmdir()


def _let_everybody_read(folder: Path) -> None:
    # The engine's user is nobody we know.
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
