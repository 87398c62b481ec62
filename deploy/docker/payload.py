"""`python deploy/docker/payload.py <folder>`: the plugin, and what vLLM's image lacks of its imports, in one folder.

For each CPython that vLLM runs on, side by side: compiled modules carry the version in their names. Run while an image
is built, by the Python of an environment with pip, from the root of the repository; standard library only.
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
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Those that vLLM 0.32 runs on."""
PACKAGES = ("contextcache", "context_manager", "kv_sidecar", "vllm_plugin")
"""Packages of ours that the plugin imports."""
_GLIBC = 28
"""Minor version of glibc 2 that wheels may need: vLLM's images stand on older systems too."""


def make_payload(folder: Path, *, machine: str) -> None:
    """Fill `folder` for containers of a machine, as `uname -m` names it. Raises CalledProcessError, SystemExit."""
    wanted = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    with tempfile.TemporaryDirectory() as downloads:
        ours = Path(downloads, "ours")
        _pip("wheel", "--no-deps", "--wheel-dir", str(ours), ".")
        theirs = Path(downloads, "theirs")
        for python in PYTHONS:
            _pip("download", "--dest", str(theirs), *_target(python, machine), *wanted)
        unpack(sorted(theirs.glob("*.whl")), folder)
        unpack(ours.glob("*.whl"), folder, only=PACKAGES)


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
    options = ["--no-deps", "--only-binary", ":all:", "--constraint", "constraints.txt"]
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
    make_payload(Path(sys.argv[1]), machine=platform.machine())
