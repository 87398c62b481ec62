"""Which parts have passed with a tree and a seed, so that `make test-all` goes on where it was stopped."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from tests.suite.run import FOLDER, ROOT

FILE = FOLDER / "state.json"


def git(*words: str, **environment: str) -> str:
    """Return what git answers in this checkout."""
    command = ["git", *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def tree_id() -> str:
    """Return git's name for all files as they are now, committed or not; what it ignores does not count."""
    with tempfile.TemporaryDirectory() as directory:
        index = str(Path(directory) / "index")
        git("read-tree", "HEAD", GIT_INDEX_FILE=index)
        git("add", "--all", GIT_INDEX_FILE=index)
        return git("write-tree", GIT_INDEX_FILE=index)


class State:
    """What has passed. Written after each part, whole."""

    def __init__(self, file: Path, tree: str) -> None:
        """What another tree had passed is forgotten."""
        self._file = file
        told = json.loads(file.read_text()) if file.exists() else {}
        self._told = told if told.get("tree") == tree else {"tree": tree, "commit": "", "seed": None, "passed": {}}

    @property
    def seed(self) -> int | None:
        """The seed of what has passed."""
        return self._told["seed"]

    @property
    def passed(self) -> dict[str, float]:
        """Parts, and the seconds each took."""
        return dict(self._told["passed"])

    def begin(self, seed: int, commit: str) -> None:
        """Begin anew, or go on with the same seed."""
        if seed != self.seed:
            self._told |= {"seed": seed, "passed": {}}
        self._told["commit"] = commit
        self._write()

    def note(self, part: str, wall_s: float) -> None:
        """Remember that a part has passed."""
        self._told["passed"][part] = round(wall_s)
        self._write()

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._told, indent=1))
        new.replace(self._file)
