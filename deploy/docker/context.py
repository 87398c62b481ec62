"""The build context: wheels for the image's Python, and the payload for vLLM's containers. Made on the host by pip.

Everything is a wheel that exists or is made here; nothing is compiled and the build itself needs no network.
"""

from __future__ import annotations

import platform
import shutil
import sys
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.local.install import ROOT
from deploy.local.progress import Step, StepFailed, run_logged

HERE = Path(__file__).parent
EXTRAS = ("gateway", "manager", "sidecar", "injector", "doctor", "tracing")
PAYLOAD_PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Pythons that vLLM 0.32 runs on: compiled modules carry the version in their names, so they lie side by side."""
PAYLOAD_PACKAGES = ("contextcache", "context_manager", "kv_sidecar", "vllm_plugin")
"""Packages of ours that the plugin imports."""
_MORE = ("async-timeout",)
"""What the base's Python may need beyond this one: redis asks for it below 3.11.3, which is what bookworm has."""
_GLIBC = 36
"""Minor version of glibc 2 in Debian bookworm, which wheels for the image may need."""
_PAYLOAD_GLIBC = 28
"""The same for the payload: vLLM's images stand on older systems too."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the image is made for."""

    python: str = "3.11"
    """Version of the base's Python, `3.11`."""
    machine: str = platform.machine()
    """As `uname -m` says it: x86_64, aarch64."""


def make_context(folder: Path, target: Target, *, log: Path) -> str:
    """Fill `folder` with Dockerfiles, wheels and payload, and return the project's version. Raises StepFailed."""
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    for name in ("Dockerfile", "Dockerfile.vllm"):
        shutil.copy(HERE / name, folder / name)
    build = [*_pip(), "wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)]
    run_logged(build, what="the project's wheel", log=log)
    ours = next(wheels.glob("context_cache-*.whl"))
    wanted = f"{ours}[{','.join(EXTRAS)}]"
    run_logged(_download([wanted, *_MORE], wheels, target, glibc=_GLIBC), what="wheels of what it needs", log=log)
    make_payload(folder / "payload", ours, target, log=log)
    return ours.name.split("-")[1]


def make_payload(folder: Path, ours: Path, target: Target, *, log: Path) -> None:
    """Unpack into `folder` the plugin and what vLLM's image lacks, for all of `PAYLOAD_PYTHONS`. Raises StepFailed."""
    wanted = [line for line in (HERE / "payload.txt").read_text().splitlines() if line and not line.startswith("#")]
    downloads = folder.with_name("payload-wheels")
    for python in PAYLOAD_PYTHONS:
        command = _download(wanted, downloads, replace(target, python=python), "--no-deps", glibc=_PAYLOAD_GLIBC)
        run_logged(command, what=f"the plugin's wheels for Python {python}", log=log)
    with Step("payload"):
        unpack(sorted(downloads.glob("*.whl")), folder)
        unpack([ours], folder, only=PAYLOAD_PACKAGES)
    shutil.rmtree(downloads)


def unpack(wheels: Iterable[Path], folder: Path, *, only: Sequence[str] = ()) -> None:
    """Unpack wheels into one folder; `only`: just these top-level packages. Equal names must have equal bytes.

    Raises StepFailed when two wheels disagree: they would be of different releases.
    """
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                top = info.filename.split("/", 1)[0]
                if info.is_dir() or top.endswith((".dist-info", ".data")) or (only and top not in only):
                    continue
                path, data = folder / info.filename, archive.read(info)
                if path.exists() and path.read_bytes() != data:
                    raise StepFailed(f"{wheel.name}: {info.filename} differs from what another wheel brought")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


def _download(wanted: Sequence[str], folder: Path, target: Target, *more: str, glibc: int) -> list[str]:
    command = [*_pip(), "download", "--dest", str(folder), "--only-binary", ":all:", "--python-version", target.python]
    command += ["--implementation", "cp"]
    for abi in (f"cp{target.python.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for name in ("manylinux2014", *(f"manylinux_2_{minor}" for minor in range(glibc, 16, -1))):
        command += ["--platform", f"{name}_{target.machine}"]
    return [*command, "--constraint", str(ROOT / "constraints.txt"), *more, *wanted]


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
