"""Where engine and sidecar share memory: the pod's own /dev/shm when it has one, else a volume of ours. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from injector.not_injected import NotInjected, Reason

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the mount, not a file in it
_LIMIT = "SIDECAR_MEMORY_LIMIT_BYTES"
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def own_mount(pod: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the engine's own mount at /dev/shm, or None. Raises NotInjected when no other container may use it."""
    found = [mount for mount in container.get("volumeMounts") or [] if _is_shared_memory(mount)]
    if not found:
        return None
    volume = volume_of(pod, found[0])
    if "hostPath" in volume:
        raise NotInjected(Reason.SHARED_MEMORY, "the engine's /dev/shm is the node's, which other pods share")
    if found[0].get("readOnly"):
        raise NotInjected(Reason.SHARED_MEMORY, "the engine's /dev/shm is read-only")
    return dict(found[0])


def volume_of(pod: Mapping[str, Any], mount: Mapping[str, Any]) -> dict[str, Any]:
    """Return the volume that a mount names; empty when the pod has none of that name, which Kubernetes will refuse."""
    volumes = pod["spec"].get("volumes") or []
    return next((volume for volume in volumes if volume.get("name") == mount.get("name")), {})


def use_mount(container: dict[str, Any], mount: Mapping[str, Any]) -> str | None:
    """Mount the engine's /dev/shm in the sidecar, in place of ours; return the volume no longer used."""
    mounts = container.get("volumeMounts") or []
    replaced = next((item["name"] for item in mounts if _is_shared_memory(item)), None)
    container["volumeMounts"] = [dict(mount) if _is_shared_memory(item) else item for item in mounts]
    return replaced


def fit_memory_limit(sidecar: dict[str, Any], volume: Mapping[str, Any]) -> None:
    """Keep the sidecar's memory tier below half of a /dev/shm with a size: saves in flight and NCCL need the rest."""
    size = (volume.get("emptyDir") or {}).get("sizeLimit")
    room = None if size is None else quantity_bytes(str(size))
    if room is None:
        return
    env = [dict(item) for item in sidecar.get("env") or []]
    for item in env:
        if item["name"] == _LIMIT and int(item.get("value", "0")) > room // 2:
            item["value"] = str(room // 2)
    sidecar["env"] = env


def quantity_bytes(quantity: str) -> int | None:
    """Return a Kubernetes quantity in bytes; None for one that is not understood."""
    unit = next((unit for unit in _UNITS if quantity.endswith(unit)), "")
    try:
        return int(Decimal(quantity.removesuffix(unit)) * _UNITS.get(unit, 1))
    except ArithmeticError:
        return None


def _is_shared_memory(mount: Mapping[str, Any]) -> bool:
    return str(mount.get("mountPath", "")).rstrip("/") == SHARED_MEMORY
