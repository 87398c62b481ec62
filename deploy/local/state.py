"""What the stack remembers between two `make` calls, under `.stack/`: where things are, what runs, how it was started.

`state.json` is for anyone to read: `{part: {"pid", "url", "started"}}`. Files appear whole (temporary file, then
rename). Secrets are made once and readable by their owner only.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.local.processes import ProcessName
from deploy.local.progress import StepFailed

API_KEYS = {"test-key-1234567890": "demo", "test-key-other": "other"}
"""Key → tenant. Known to everyone, which is why the stack listens on loopback only."""
MIN_SHARED_MEMORY_BYTES = 256 << 20
"""With less in all (a container's default is 64 MiB), KV travels in gRPC frames instead."""
_SHARED_MEMORY = Path("/dev/shm")


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


@dataclass(frozen=True, slots=True)
class StackPaths:
    """Every path of one stack. `root` is absolute."""

    root: Path

    @property
    def state(self) -> Path:
        """The running parts."""
        return self.root / "state.json"

    @property
    def settings(self) -> Path:
        """How the stack was started, so that one part can be started again the same way."""
        return self.root / "settings.json"

    @property
    def lock(self) -> Path:
        """Held while the stack is being changed."""
        return self.root / "lock"

    @property
    def data(self) -> Path:
        """What survives `make down`: sessions and KV."""
        return self.root / "data"

    @property
    def secret(self) -> Path:
        """Signs what gateway, middleware and connector tell each other."""
        return self.root / "secrets" / "signing"

    @property
    def api_keys(self) -> Path:
        """Hashes of the API keys and their tenants."""
        return self.root / "secrets" / "api-keys.json"

    @property
    def run(self) -> Path:
        """Shared memory and sockets of this stack; named after it, gone with it.

        A short path also because a Unix socket's may have 107 characters only.
        """
        parent = _SHARED_MEMORY if _shared_memory_total() >= MIN_SHARED_MEMORY_BYTES else Path(tempfile.gettempdir())
        return parent / f"context-cache-{hashlib.sha256(str(self.root).encode()).hexdigest()[:12]}"

    @property
    def shared_memory_free(self) -> int:
        """Bytes free in shared memory for this stack; 0 when there is too little of it to use any."""
        return shutil.disk_usage(_SHARED_MEMORY).free if self.run.is_relative_to(_SHARED_MEMORY) else 0

    @property
    def endpoints(self) -> Path:
        """The pods as the gateway is told of them; it reads the file again when it changes."""
        return self.root / "endpoints.json"

    @property
    def envoy(self) -> Path:
        """Envoy's bootstrap."""
        return self.root / "envoy.yaml"

    def sidecar_data(self, sidecar: str) -> Path:
        """Return where a sidecar, named as its part, keeps blocks."""
        return self.data / sidecar

    def sidecar_socket(self, sidecar: str) -> Path:
        """Return where its engine and the turn middleware find a sidecar."""
        return self.run / f"{sidecar}.sock"

    def shared_blocks(self, sidecar: str) -> Path:
        """Return where a sidecar and its engine share blocks."""
        return self.run / f"{sidecar}-blocks"

    @property
    def scratch(self) -> Path:
        """`TMPDIR` of every part: what a killed engine leaves there goes with the stack."""
        return self.run / "tmp"

    def log(self, part: str) -> Path:
        """Return the log of a part."""
        return self.root / "logs" / f"{part}.log"


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
        keys = [
            {"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": owner} for key, owner in API_KEYS.items()
        ]
        _write_private(paths.api_keys, json.dumps({"keys": keys}, indent=2))


def _shared_memory_total() -> int:
    return shutil.disk_usage(_SHARED_MEMORY).total if os.access(_SHARED_MEMORY, os.W_OK) else 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as exc:
        raise StepFailed(f"{path} is damaged ({exc}); end what runs by hand, then `make clean`") from exc
    assert isinstance(parsed, dict), path
    return parsed


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    _write_private(path, json.dumps(content, indent=2) + "\n")


def _write_private(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    scratch.rename(path)
