"""The additions to a pod, as the chart writes them from the templates of its own engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_PREFIX = "context-cache-"
_DEFAULTS = Path(__file__).with_name("default_parts.json")


class PatchParts(BaseModel):
    """Content of `INJECTOR_PARTS_FILE`. Kubernetes' own objects are checked only as far as the injector reads them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str = Field(min_length=1, max_length=63, description="Value of the annotation context-cache.io/injected.")
    engines: str = Field(min_length=1, max_length=63, description="Value of the label context-cache.io/engines.")
    port: int = Field(ge=1, le=65535, description="Port on which every engine of the release serves HTTP.")
    https: bool = Field(False, description="Engines of the release serve HTTPS. Probes follow it.")
    payload: dict[str, Any] = Field(description="Init container that copies the connector.")
    sidecar: dict[str, Any] = Field(description="The kv-sidecar, a native sidecar.")
    turn: dict[str, Any] = Field(description="The turn process, a container beside the engine.")
    volumes: tuple[dict[str, Any], ...] = Field(description="Volumes of our containers and of the engine.")
    mounts: tuple[dict[str, Any], ...] = Field(description="Volume mounts of the engine.")
    arguments: tuple[str, ...] = Field(description="Arguments that vLLM's process adds to its own.")
    python_path: str = Field(min_length=1, description="Directory put before PYTHONPATH.")
    image_pull_secrets: tuple[str, ...] = Field((), description="Names of the pull Secrets of the payload's image.")


def default_parts() -> PatchParts:
    """Return the parts of a release with the chart's default values, as far as they decide about a pod.

    They serve a preview without a release. The image's registry does not exist, and resources and probes are absent.
    """
    return read_parts(_DEFAULTS)


def read_parts(path: Path) -> PatchParts:
    """Return the parts in a file. Raises OSError, or ValueError that names each fault."""
    try:
        return with_own_names(PatchParts.model_validate(json.loads(path.read_bytes())))
    except ValidationError as exc:
        faults = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in exc.errors())
        raise ValueError(f"{path}: {faults}") from exc
    except ValueError as exc:
        raise ValueError(f"{path} is not JSON: {exc}") from exc


def with_own_names(parts: PatchParts) -> PatchParts:
    """Return the parts with prefixed names of volumes: the chart's engine has common ones, such as `tls`."""

    def named(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**item, "name": _PREFIX + item["name"].removeprefix(_PREFIX)} for item in items]

    containers = {
        key: {**container, "volumeMounts": named(container.get("volumeMounts") or [])}
        for key, container in (("payload", parts.payload), ("sidecar", parts.sidecar), ("turn", parts.turn))
    }
    volumes = {"volumes": tuple(named(parts.volumes)), "mounts": tuple(named(parts.mounts))}
    return parts.model_copy(update=containers | volumes)
