"""What the stack remembers between two `make` calls, under `.stack/`: where things are, what runs, how it was started.

`state.json` is for anyone to read: `{part: {"pid", "url", "started"}}`. Files appear whole (temporary file, then
rename). Secrets are made once and readable by their owner only.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.local.paths import StackPaths
from deploy.local.processes import ProcessName
from deploy.local.progress import StepFailed

KEEPING_KEY = "test-key-keep"
API_KEYS: dict[str, dict[str, Any]] = {
    "test-key-1234567890": {"tenant": "demo"},
    "test-key-other": {"tenant": "other"},
    KEEPING_KEY: {"tenant": "keeper", "plain": "keep"},
    "test-key-operator": {"tenant": "operator", "operator": True},
}
"""Keys, and what their entries say. Known to everyone, which is why the stack listens on loopback only."""


@dataclass(frozen=True, slots=True)
class RunningPart:
    """A process as recorded when it was started; whether it still runs is another question."""

    pid: int
    url: str
    started: str

    @property
    def name(self) -> ProcessName:
        """The process, safe against a reused pid."""
        return ProcessName(self.pid, self.started)


def read_state(paths: StackPaths) -> dict[str, RunningPart]:
    """Return the recorded parts, dead ones too. Raises StepFailed when the file is damaged."""
    return {part: RunningPart(**record) for part, record in _read_json(paths.state).items()}


def write_part(paths: StackPaths, part: str, running: RunningPart) -> None:
    """Record one part."""
    parts = read_state(paths) | {part: running}
    _write_json(paths.state, {name: asdict(record) for name, record in parts.items()})


def read_settings(paths: StackPaths) -> dict[str, Any]:
    """Return how the stack was started last; empty when it never was."""
    return _read_json(paths.settings)


def write_settings(paths: StackPaths, settings: Mapping[str, Any]) -> None:
    """Remember how the stack is being started."""
    _write_json(paths.settings, settings)


def write_endpoints(paths: StackPaths, endpoints: Sequence[Mapping[str, Any]]) -> None:
    """Tell the gateway of the pods."""
    _write_private(paths.endpoints, json.dumps([dict(endpoint) for endpoint in endpoints], indent=2) + "\n")


def mark_draining(paths: StackPaths, endpoint: str, *, draining: bool) -> None:
    """Say of one pod whether it is to get no new work."""
    endpoints = json.loads(paths.endpoints.read_text())
    write_endpoints(
        paths, [entry | {"draining": draining} if entry["name"] == endpoint else entry for entry in endpoints]
    )


def make_secrets(paths: StackPaths) -> None:
    """Create the signing secret and the API-key file where they are missing."""
    paths.secret.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not paths.secret.exists():
        _write_private(paths.secret, secrets.token_hex(32))
    if not paths.api_keys.exists():
        keys = [{"sha256": hashlib.sha256(key.encode()).hexdigest(), **entry} for key, entry in API_KEYS.items()]
        _write_private(paths.api_keys, json.dumps({"keys": keys}, indent=2))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as exc:
        raise StepFailed(
            f"{path} is damaged ({exc}): end the running processes by hand, then run `make clean`"
        ) from exc
    assert isinstance(parsed, dict), path
    return parsed


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    _write_private(path, json.dumps(content, indent=2) + "\n")


def _write_private(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    scratch.rename(path)
