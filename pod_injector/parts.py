"""What is put into a pod, as the chart wrote it: the same text its own engine Deployment is made of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_PREFIX = "context-cache-"


class PatchParts(BaseModel):
    """The file of `INJECTOR_PARTS_FILE`. Objects are Kubernetes' own, not looked into more than needed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str = Field(min_length=1, max_length=63, description="what the annotation context-cache.io/injected says")
    engines: str = Field(min_length=1, max_length=63, description="value of the label context-cache.io/engines")
    port: int = Field(ge=1, le=65535, description="port on which every engine of the release serves HTTP")
    https: bool = Field(False, description="whether engines of the release serve HTTPS: probes follow")
    payload: dict[str, Any] = Field(description="the init container that copies the plugin")
    sidecar: dict[str, Any] = Field(description="the kv-sidecar, a native sidecar")
    volumes: tuple[dict[str, Any], ...] = Field(description="volumes of payload, sidecar and engine")
    env: tuple[dict[str, Any], ...] = Field(description="env items of the engine")
    mounts: tuple[dict[str, Any], ...] = Field(description="volume mounts of the engine")
    arguments: tuple[str, ...] = Field(description="appended to vLLM's command line")
    python_path: str = Field(min_length=1, description="directory put before PYTHONPATH")
    image_pull_secrets: tuple[str, ...] = Field((), description="names of Secrets that the payload's image needs")


def read_parts(path: Path) -> PatchParts:
    """Return the parts in a file. Raises ValueError that says what is wrong with it, OSError."""
    try:
        return with_own_names(PatchParts.model_validate(json.loads(path.read_bytes())))
    except ValidationError as exc:
        faults = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in exc.errors())
        raise ValueError(f"{path}: {faults}") from exc
    except ValueError as exc:
        raise ValueError(f"{path} is not JSON: {exc}") from exc


def with_own_names(parts: PatchParts) -> PatchParts:
    """Return the parts with volumes whose names no pod has by chance: the chart's own engine calls one `tls`."""

    def named(items: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        return tuple({**item, "name": _own_name(item["name"])} for item in items)

    def mounting(container: dict[str, Any]) -> dict[str, Any]:
        return {**container, "volumeMounts": list(named(container.get("volumeMounts") or []))}

    changed = {"volumes": named(parts.volumes), "mounts": named(parts.mounts)}
    containers = {"payload": mounting(parts.payload), "sidecar": mounting(parts.sidecar)}
    return parts.model_copy(update={**changed, **containers})


def _own_name(name: str) -> str:
    return name if name.startswith(_PREFIX) else f"{_PREFIX}{name}"
