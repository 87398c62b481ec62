"""Where one stack keeps what is its own: `.stack/` and a directory for sockets; made, locked, removed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.local.progress import StepFailed, say

NEEDED_DISK_BYTES = 2 << 30
_TEMPORARY = (Path("/tmp"), Path("/var/tmp"))


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
        """Signs what gateway, turn process and connector tell each other."""
        return self.root / "secrets" / "signing"

    @property
    def api_keys(self) -> Path:
        """Hashes of the API keys and their tenants."""
        return self.root / "secrets" / "api-keys.json"

    @property
    def run(self) -> Path:
        """Sockets and temporary files of this stack; named after it, gone with it.

        Not under `root`, and not where TMPDIR says: a Unix socket's path may have 107 characters only, and every shell
        must find the same one.
        """
        name = f"context-cache-{hashlib.sha256(str(self.root).encode()).hexdigest()[:12]}"
        return next((parent for parent in _TEMPORARY if os.access(parent, os.W_OK)), self.root) / name

    @property
    def endpoints(self) -> Path:
        """The pods as the gateway is told of them; it reads the file again when it changes."""
        return self.root / "endpoints.json"

    @property
    def envoy(self) -> Path:
        """What Envoy starts from: its bootstrap, and what it checks keys with."""
        return self.root / "envoy"

    @property
    def store(self) -> Path:
        """The directory that the sidecars share, where there is one."""
        return self.data / "store"

    def sidecar_data(self, sidecar: str) -> Path:
        """Return where a sidecar, named as its part, keeps blocks."""
        return self.data / sidecar

    def sidecar_socket(self, sidecar: str) -> Path:
        """Return where its engine and the turn process find a sidecar."""
        return self.run / f"{sidecar}.sock"

    @property
    def scratch(self) -> Path:
        """`TMPDIR` of every part: what a killed engine leaves there goes with the stack."""
        return self.run / "tmp"

    def log(self, part: str) -> Path:
        """Return the log of a part."""
        return self.root / "logs" / f"{part}.log"

    def make(self, sidecars: Sequence[str], *, fresh: bool) -> None:
        """Make every directory; `fresh`: the sockets and temporary files of a stack that was killed go first.

        Raises StepFailed when the disk is too full.
        """
        free = shutil.disk_usage(self.root).free
        if free < NEEDED_DISK_BYTES:
            raise StepFailed(f"{free / 2**30:.1f} GiB free under {self.root}; about 2 GiB are needed for KV and logs")
        if fresh:
            self.remove_run()
        for directory in (self.data / "redis", self.root / "logs", *map(self.sidecar_data, sidecars)):
            directory.mkdir(parents=True, exist_ok=True)
        self.run.mkdir(mode=0o700, exist_ok=True)
        self.scratch.mkdir(mode=0o700, exist_ok=True)

    def remove_run(self) -> None:
        """Remove sockets and temporary files."""
        shutil.rmtree(self.run, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the stack against other callers; wait for one that has it."""
        self.root.mkdir(parents=True, exist_ok=True)
        with self.lock.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("  waiting for another make call that changes this stack")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
