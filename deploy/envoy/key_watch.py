"""Keeps Envoy's check of API keys like the key file: looks every second, writes the filter anew when keys changed.

A broken file changes nothing, as in the gateway: the last good keys stay, and the log says so once for each state.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from contextcache.process.settings import file_version
from deploy.envoy.api_keys import discovered
from gateway.tenants.keys import read_digests

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_STOP_S = 5.0


class KeyWatch:
    """Writes `filter_file` from `keys_file`, at once and when that changes."""

    def __init__(self, keys_file: Path, filter_file: Path) -> None:
        """Write it for the first time. Raises ValueError when the key file is broken, OSError."""
        self._keys_file = keys_file
        self._filter_file = filter_file
        self._version = file_version(keys_file)
        self._failed_version: tuple[int, int, int] | None = (0, 0, 0)
        """Of a file that could not be taken over, None: it is gone."""
        self._stopped = threading.Event()
        filter_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look for changes in a thread of its own for the block."""
        thread = threading.Thread(target=self._watch, name="key-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join(_STOP_S)

    def look(self) -> None:
        """Write the filter anew if the key file is another one than at the last look."""
        version = file_version(self._keys_file)
        if version == self._version:
            return
        try:
            self._write()
        except (OSError, ValueError) as exc:
            # Tried again at every look, told once.
            if version != self._failed_version:
                log.warning("key file not taken over, Envoy keeps the last good keys", extra={"error": str(exc)})
            self._failed_version = version
        else:
            self._version = version

    def _watch(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            self.look()

    def _write(self) -> None:
        """Publish at once: Envoy reads the file when it is moved to its place."""
        digests = read_digests(self._keys_file)
        new = self._filter_file.with_suffix(".new")
        new.write_text(json.dumps(discovered(digests)))
        new.replace(self._filter_file)
        log.info("keys written for Envoy", extra={"num_keys": len(digests)})
