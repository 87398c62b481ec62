"""A real kv-sidecar process on a Unix socket, that tests kill and start again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from contextcache.errors import ContextCacheError, SidecarUnavailable
from contextcache.model import Manifest
from kv_sidecar.client import EngineSidecarClient
from kv_sidecar.settings import SidecarSettings
from tests.kit.kv_blocks import open_block_file
from tests.kit.until import wait_until
from tests.kit.vouching import change_bytes, vouch_for_what_lies_there

START_DEADLINE_S = 90


class SidecarProcess:
    """Data survives `kill`, memory does not."""

    def __init__(
        self,
        directory: Path,
        *,
        block_tokens: int = 256,
        memory_limit_bytes: int = 256 << 20,
        **settings: object,
    ) -> None:
        """`memory_limit_bytes` 0: no arena, all KV travels in frames. `settings`: fields, or bounds, by name."""
        self._directory = directory
        self.address = f"unix://{directory}/sidecar.sock"
        self._environment = {
            **os.environ,
            "SIDECAR_UNIX_SOCKET": str(directory / "sidecar.sock"),
            "SIDECAR_LISTEN": "",
            "SIDECAR_DATA_DIR": str(directory / "data"),
            "SIDECAR_MEMORY_LIMIT_BYTES": str(memory_limit_bytes),
            "SIDECAR_BLOCK_TOKENS": str(block_tokens),
            "SIDECAR_LOG_LEVEL": "WARNING",
        }
        bounds = {name: settings.pop(name) for name in settings.keys() - SidecarSettings.model_fields}
        self._environment |= {f"SIDECAR_{name.upper()}": str(value) for name, value in settings.items()}
        self._environment["SIDECAR_BOUNDS"] = json.dumps(bounds)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.bounded_sidecar"], env=self._environment, cwd=root
        )
        client = EngineSidecarClient(self.address, timeout_s=1)
        try:
            wait_until(lambda: self._answers(client), what="the sidecar answers", deadline_s=START_DEADLINE_S)
        finally:
            client.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Have the process stand still (SIGSTOP)."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Have a stopped process run again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def wait_sealed(self, cache_ref: str) -> Manifest:
        """Wait until a context of tenant `demo` is durable; return its manifest."""
        client = EngineSidecarClient(self.address, timeout_s=5)
        try:
            wait_until(lambda: fault(lambda: client.get_manifest("demo", cache_ref, 1)) is None, what="it is sealed")
            return client.get_manifest("demo", cache_ref, 5)[0]
        finally:
            client.close()

    def erase(self) -> None:
        """Remove all data; only while the process is down."""
        shutil.rmtree(self._directory / "data")

    def _answers(self, client: EngineSidecarClient) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "the sidecar ended"
        return not isinstance(fault(lambda: client.get_manifest("demo", "ref_" + "0" * 32, 1)), SidecarUnavailable)

    def block_files(self) -> list[Path]:
        """Block and tail files on disk, manifests not counted."""
        found = []
        for path in sorted((self._directory / "data").rglob("*.safetensors")):
            try:
                open_block_file(path).close()
            except ContextCacheError:
                continue
            found.append(path)
        return found

    def flip_bytes(self, *, rewrite_checksum: bool) -> None:
        """Change every KV value in every block file on disk; only while the process is down.

        `rewrite_checksum`: in the files and in the manifests, so that the changed values are served.
        """
        for path in self.block_files():
            change_bytes(path, reseal=rewrite_checksum)
        if rewrite_checksum:
            assert vouch_for_what_lies_there(self._directory / "data")


def fault(call: Callable[[], object]) -> ContextCacheError | None:
    """Return the error of a call, or None."""
    try:
        call()
    except ContextCacheError as exc:
        return exc
    return None
