"""The pods in a JSON file with the same list as `GATEWAY_ENDPOINTS`, read again when it changes.

Replace the file as a whole: write another one and rename it. A half-written file is refused and read again a second
later. An empty list means no pods.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from contextcache.process.reloaded import Reloaded, read_bounded
from gateway.metrics import Metrics
from gateway.pods.state import Endpoint
from gateway.settings import EndpointSettings

_FILE_BYTES_MAX = 4 << 20
"""Largest file: some ten thousand pods."""
_LIST = TypeAdapter(tuple[EndpointSettings, ...])


def endpoint_file(path: Path, metrics: Metrics) -> Reloaded[tuple[Endpoint, ...]]:
    """Return the reader of an endpoint file. A broken change is counted, and the last good endpoints stay.

    Raises ValueError for a broken file, OSError for an unreadable one.
    """
    return Reloaded(
        path, read=lambda: _read(path), name="endpoint file", on_failure=metrics.endpoint_reload_failures.inc
    )


def endpoint_of(settings: EndpointSettings) -> Endpoint:
    """Return the pod of an entry."""
    return Endpoint(
        settings.name, settings.url, settings.sidecar, draining=settings.draining, turn_url=settings.turn_url
    )


def _read(path: Path) -> tuple[Endpoint, ...]:
    try:
        found = _LIST.validate_json(read_bounded(path, _FILE_BYTES_MAX))
    except ValidationError as exc:
        first = exc.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{path}: {place}: {first['msg']}") from exc
    names = [settings.name for settings in found]
    if len(set(names)) != len(names):
        raise ValueError(f"{path}: two endpoints have the same name")
    return tuple(map(endpoint_of, found))
