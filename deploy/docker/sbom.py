"""What is in an image, as SPDX and CycloneDX, written by syft."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from deploy.local.progress import run_logged

_FORMATS = {"spdx": "spdx-json", "cyclonedx": "cyclonedx-json"}


def write_sboms(archive: Path, stem: Path, *, log: Path) -> dict[str, Any]:
    """Write `<stem>.spdx.json` and `<stem>.cyclonedx.json` of an OCI archive. Raises StepFailed.

    Returns their names and the number of packages.
    """
    paths = {name: stem.with_name(f"{stem.name}.{name}.json") for name in _FORMATS}
    syft = str(Path(sys.executable).with_name("syft"))
    command = [syft, "scan", f"oci-archive:{archive}", "--quiet"]
    for name, form in _FORMATS.items():
        command += ["--output", f"{form}={paths[name]}"]
    run_logged(command, what=f"SBOM of {archive.name}", log=log)
    packages = json.loads(paths["spdx"].read_text())["packages"]
    return {"sboms": [path.name for path in paths.values()], "num_packages": len(packages)}
