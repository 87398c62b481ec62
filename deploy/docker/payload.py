"""`payload.py <folder> <wheels>`: the connector, and its imports that vLLM's image lacks, in one folder.

For each CPython that vLLM runs on, side by side: compiled modules carry the version in their names. `wheels` is a
folder with both wheels of ours. An image build runs it, by the Python of an environment with pip; standard library
only.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("payload.txt")
LOCK = Path(__file__).with_name("image.lock")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Those that vLLM 0.32 runs on."""
PACKAGES = ("contextcache", "kv_sidecar", "vllm_plugin")
"""Packages of ours that the connector imports."""
_GLIBC = 28
"""Minor version of glibc 2 that wheels may need: vLLM's images stand on older systems too."""


def make_payload(folder: Path, *, wheels: Path, machine: str) -> None:
    """Fill `folder` for containers of a machine, as `uname -m` names it. Raises CalledProcessError, SystemExit."""
    with tempfile.TemporaryDirectory() as downloads:
        theirs = Path(downloads, "theirs")
        wanted = Path(downloads, "wanted.lock")
        wanted.write_text("\n".join(locked(LOCK.read_text(), names())))
        for python in PYTHONS:
            _pip("download", "--dest", str(theirs), *_target(python, machine), "--requirement", str(wanted))
        unpack(sorted(theirs.glob("*.whl")), folder)
        unpack(sorted(wheels.glob("context_cache*.whl")), folder, only=PACKAGES)


def names() -> list[str]:
    """Return the packages that vLLM's image may lack."""
    return [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]


def locked(lock: str, names: Sequence[str]) -> list[str]:
    """Return the lines of a lock with versions and hashes of some packages. Raises SystemExit for a missing one."""
    lines = {line.partition("==")[0]: line for line in lock.splitlines()}
    if missing := sorted(set(names) - lines.keys()):
        raise SystemExit(f"{LOCK.name} has no {', '.join(missing)}: make lock")
    return [lines[name] for name in names]


def unpack(wheels: Iterable[Path], folder: Path, *, only: Sequence[str] = ()) -> None:
    """Unpack wheels into one folder; `only`: just these top-level packages. Equal names must have equal bytes.

    Raises SystemExit when two wheels disagree: they would be of different releases.
    """
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                top = info.filename.split("/", 1)[0]
                if info.is_dir() or top.endswith((".dist-info", ".data")) or (only and top not in only):
                    continue
                path, data = folder / info.filename, archive.read(info)
                if path.exists() and path.read_bytes() != data:
                    raise SystemExit(f"{wheel.name}: {info.filename} differs from what another wheel brought")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


def _target(python: str, machine: str) -> list[str]:
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    options += ["--implementation", "cp", "--python-version", python]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        options += ["--abi", abi]
    for name in ("manylinux2014", *(f"manylinux_2_{minor}" for minor in range(_GLIBC, 16, -1))):
        options += ["--platform", f"{name}_{machine}"]
    return options


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    make_payload(Path(sys.argv[1]), wheels=Path(sys.argv[2]), machine=platform.machine())
