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

    version: str = Field(min_length=1, max_length=63, description="Value of the annotation context-cache.io/injected.")
    engines: str = Field(min_length=1, max_length=63, description="Value of the label context-cache.io/engines.")
    port: int = Field(ge=1, le=65535, description="Port on which every engine of the release serves HTTP.")
    https: bool = Field(False, description="Engines of the release serve HTTPS. Probes follow it.")
    payload: dict[str, Any] = Field(description="Init container that copies the plugin.")
    sidecar: dict[str, Any] = Field(description="The kv-sidecar, a native sidecar.")
    volumes: tuple[dict[str, Any], ...] = Field(description="Volumes of payload, sidecar and engine.")
    env: tuple[dict[str, Any], ...] = Field(description="Env items of the engine.")
    mounts: tuple[dict[str, Any], ...] = Field(description="Volume mounts of the engine.")
    arguments: tuple[str, ...] = Field(description="Arguments appended to vLLM's command line.")
    python_path: str = Field(min_length=1, description="Directory put before PYTHONPATH.")
    image_pull_secrets: tuple[str, ...] = Field((), description="Names of the pull Secrets of the payload's image.")


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
