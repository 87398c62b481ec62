"""Copies the connector, and packages that vLLM's image may lack, into a volume of vLLM's container.

It runs in an init container of the injected pod, from our image. A rename puts each copy in place, so a
killed container leaves no incomplete copy under the final name.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pod_injector import payload_start

SOURCE = Path("/opt/context-cache/payload")
"""Packages in our image, for each CPython that vLLM runs on (deploy/docker/payload.txt)."""
START = "start"
"""Directory on PYTHONPATH: the files of `payload_start`."""
PACKAGES = "packages"
"""Directory that START/sitecustomize.py appends to the search path."""


def copy_payload(target: Path, *, source: Path = SOURCE) -> None:
    """Fill `target` with START and PACKAGES, and replace those of an earlier run. Raises OSError."""
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is missing: this image was built without the payload")
    incoming = target / ".incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    shutil.copytree(source, incoming / PACKAGES, ignore=shutil.ignore_patterns("__pycache__"))
    start = Path(payload_start.__file__).parent
    shutil.copytree(start, incoming / START, ignore=shutil.ignore_patterns("__pycache__", "__init__.py"))
    # The engine may run as any user.
    for path in (incoming, *incoming.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for name in (PACKAGES, START):
        shutil.rmtree(target / name, ignore_errors=True)
        (incoming / name).rename(target / name)
    incoming.rmdir()
