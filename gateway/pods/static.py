"""The pods named in a file, read again when it changes. Knows nothing of how they do.

The file is JSON, the list that `GATEWAY_ENDPOINTS` would be. Replace it as a whole (write another, rename it over): a
half-written one is refused, and read once more when it has changed again. An empty list is what it says: no pods.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from contextcache.process.settings import file_version
from gateway.metrics import Metrics
from gateway.pods.state import Endpoint
from gateway.settings import EndpointSettings

log = logging.getLogger(__name__)

_FILE_BYTES_MAX = 4 << 20
"""Some ten thousand pods."""
_LIST = TypeAdapter(tuple[EndpointSettings, ...])


class EndpointFile:
    """Endpoints from a file; a broken change of it is counted, and changes nothing."""

    def __init__(self, path: Path, *, metrics: Metrics) -> None:
        """Read the file. Raises ValueError when it is broken, OSError when it cannot be read."""
        self._path = path
        self._metrics = metrics
        self._version = file_version(path)
        self.endpoints = _read(path)
        """The last good ones."""

    def changed(self) -> Sequence[Endpoint] | None:
        """Return all endpoints when the file has changed to a good one, else None. Never raises for the file."""
        version = file_version(self._path)
        if version == self._version:
            return None
        self._version = version
        try:
            self.endpoints = _read(self._path)
        except (OSError, ValueError) as exc:
            self._metrics.endpoint_reload_failures.inc()
            log.warning("endpoint file reload failed, last good endpoints stay", extra={"error": str(exc)})
            return None
        log.info("endpoint file reloaded", extra={"num_endpoints": len(self.endpoints)})
        return self.endpoints


def endpoint_of(settings: EndpointSettings) -> Endpoint:
    """Return the pod that the settings name."""
    return Endpoint(settings.name, settings.url, settings.sidecar, draining=settings.draining)


def _read(path: Path) -> tuple[Endpoint, ...]:
    with path.open("rb") as file:
        raw = file.read(_FILE_BYTES_MAX + 1)
    if len(raw) > _FILE_BYTES_MAX:
        raise ValueError(f"{path} is larger than {_FILE_BYTES_MAX} bytes")
    try:
        found = _LIST.validate_json(raw)
    except ValidationError as exc:
        first = exc.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{path}: {place}: {first['msg']}") from exc
    names = [settings.name for settings in found]
    if len(set(names)) != len(names):
        raise ValueError(f"{path}: two endpoints have the same name")
    return tuple(map(endpoint_of, found))
