"""The release before this one, as a stack runs it: its own code, out of the newest snapshot (snapshot.py).

Both releases run in the same environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from tests.upgrade.snapshot import newest_snapshot

_STEP_S = 600
_CALL = """
import json, sys
from pathlib import Path
from deploy.local.stack import Stack
directory, settings, method, arguments = json.loads(sys.argv[1])
if settings.get("model_dir"):
    settings["model_dir"] = Path(settings["model_dir"])
getattr(Stack(Path(directory), **settings), method)(*arguments)
"""


class ReleaseBefore:
    """The code of the release before, unpacked once. There must be one."""

    def __init__(self, directory: Path) -> None:
        snapshot = newest_snapshot()
        assert snapshot is not None
        with tarfile.open(snapshot) as archive:
            archive.extractall(directory, filter="data")
        self.directory = directory

    @property
    def environment(self) -> dict[str, str]:
        """What makes Python take its modules."""
        return os.environ | {"PYTHONPATH": str(self.directory)}

    def stack(self, directory: Path, method: str, *arguments: str, **settings: Any) -> None:
        """Call a method of its `deploy.local.stack.Stack` over a stack's directory, which both releases read."""
        call = json.dumps([str(directory), settings, method, arguments])
        command = [sys.executable, "-c", _CALL, call]
        subprocess.run(command, cwd=self.directory, env=self.environment, check=True, timeout=_STEP_S)
