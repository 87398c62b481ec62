"""Keeps Envoy's check of API keys like the key file: looks every second, writes the filter anew when keys changed.

A broken file changes nothing, as in the gateway: the last good keys stay, and the log says so once for each state.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Self

from contextcache.process.reloaded import Reloaded
from gateway.envoy.api_keys import discovered
from gateway.envoy.settings import EnvoySettings
from gateway.tenants.keys import read_digests

log = logging.getLogger(__name__)


class KeyWatch:
    """Writes `filter_file` from `keys_file`, at once and when that changes."""

    def __init__(self, keys_file: Path, filter_file: Path) -> None:
        """Write it for the first time. Raises ValueError when the key file is broken, OSError."""
        self._keys_file = keys_file
        self._filter_file = filter_file
        filter_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.file = Reloaded(keys_file, read=self._write, name="key file of envoy")

    @classmethod
    def of(cls, settings: EnvoySettings) -> Self:
        """Watch the key file of an Envoy that has one. Raises ValueError, OSError."""
        return cls(Path(settings.api_keys_file), Path(settings.api_keys_filter_file))

    async def follow(self) -> None:
        """Write the filter anew whenever the key file has changed, until cancelled."""
        await self.file.follow()

    def _write(self) -> None:
        """Publish at once: Envoy reads the file when it is moved to its place."""
        digests = read_digests(self._keys_file)
        new = self._filter_file.with_suffix(".new")
        new.write_text(json.dumps(discovered(digests)))
        new.replace(self._filter_file)
        log.info("keys written for Envoy", extra={"num_keys": len(digests)})
