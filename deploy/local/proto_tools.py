"""The stub generator's own environment, `.build/proto`: its protobuf is older than the one at run time.

Standard library only, like the installer.
"""

from __future__ import annotations

import sys
import tomllib
import venv
from pathlib import Path

from deploy.local.progress import Step, StepFailed, run_logged, say

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".build" / "proto"
LOG = ROOT / ".build" / "logs" / "proto.log"


def main() -> int:
    """Make the environment from the `proto` extra and return the exit status."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    try:
        with Step("environment of the proto generator"):
            venv.create(ENVIRONMENT, with_pip=True, clear=True)
        command = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
        run_logged([*command, *project["optional-dependencies"]["proto"]], what="proto generator", log=LOG)
    except StepFailed as failure:
        say(f"error: {failure}")
        return 1
    (ENVIRONMENT / ".installed").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
