"""A real kv-sidecar process on a Unix socket, that tests kill and start again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from contextcache.errors import ContextCacheError, SidecarUnavailable
from kv_sidecar.client import BlockFileWriter, EngineSidecarClient, open_block_file
from tests.helpers.vouching import vouch_for_what_lies_there

START_DEADLINE_S = 30


class SidecarProcess:
    """Data survives `kill`, memory does not."""

    def __init__(
        self, directory: Path, *, shared_directory: Path | None, block_tokens: int = 256, disk_files: bool = False
    ) -> None:
        """`disk_files`: nothing is kept in memory, and the engine reads the stored files itself."""
        self._directory = directory
        self.address = f"unix://{directory}/sidecar.sock"
        self._environment = {
            **os.environ,
            "SIDECAR_UNIX_SOCKET": str(directory / "sidecar.sock"),
            "SIDECAR_LISTEN": "",
            "SIDECAR_DATA_DIR": str(directory / "data"),
            "SIDECAR_SHARED_DIR": "" if shared_directory is None else str(shared_directory),
            "SIDECAR_BLOCK_TOKENS": str(block_tokens),
            "SIDECAR_LOG_LEVEL": "WARNING",
        }
        if disk_files:
            self._environment |= {"SIDECAR_SHARE_DATA_DIR": "1", "SIDECAR_MEMORY_LIMIT_BYTES": "0"}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen([sys.executable, "-m", "kv_sidecar"], env=self._environment, cwd=root)
        client = EngineSidecarClient(self.address, timeout_s=1)
        try:
            poll_until(lambda: self._answers(client), START_DEADLINE_S)
        finally:
            client.close()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

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
            block = open_block_file(path)
            pages, meta = block.pages.copy(), block.meta
            block.close()
            pages[:, :, 2::4] ^= 0x7F  # the upper mantissa of each float32
            if not rewrite_checksum:
                raw = bytearray(path.read_bytes())
                raw[-pages.size :] = pages.tobytes()
                path.write_bytes(raw)
                continue
            path.unlink()
            layers, blocks, page_bytes = pages.shape
            writer = BlockFileWriter(path, meta, num_layers=layers, engine_blocks=blocks, page_bytes=page_bytes)
            writer.pages[:] = pages
            writer.finish()
        if rewrite_checksum:
            assert vouch_for_what_lies_there(self._directory / "data")


def fault(call: Callable[[], object]) -> ContextCacheError | None:
    """Return the error of a call, or None."""
    try:
        call()
    except ContextCacheError as exc:
        return exc
    return None


def poll_until(condition: Callable[[], bool], deadline_s: float) -> None:
    """Ask until it is so; fail loudly at the deadline."""
    ends_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_at, "it did not become so in time"
        time.sleep(0.02)
