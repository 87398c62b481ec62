"""The Lua scripts, read once from the package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

_NAMES = ("reserve", "admit", "begin", "renew", "commit", "abort", "touch", "unregister", "sweep")


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its text, and the SHA-1 that EVALSHA calls it by."""

    text: str
    sha: str


def load_scripts() -> dict[str, Script]:
    """Return every script by name, `row.lua` in front of each."""
    folder = resources.files("context_manager") / "scripts"
    rules = (folder / "row.lua").read_text()
    texts = {name: rules + (folder / f"{name}.lua").read_text() for name in _NAMES}
    # SHA-1 is Redis's name for a script, nothing is protected by it.
    return {
        name: Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
        for name, text in texts.items()
    }
