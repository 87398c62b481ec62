"""Chooses the container of a pod that runs vLLM, and the user the sidecar shares files with it as. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pod_injector.command_line import looks_like_vllm
from pod_injector.engine_options import expanded
from pod_injector.not_injected import NotInjected, Reason

CONTAINER_ANNOTATION = "context-cache.io/container"
"""Names the container where it cannot be told, or where several could be meant."""

OLDEST_VLLM, NEWEST_VLLM = (0, 29), (0, 32)
"""Of those the contract was tested with: `make test-vllm VLLM=…`, docs/operations/install.md."""
_RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"
_RUST_IN_SCRIPT = re.compile(rf"{_RUST_FRONT_END}=[\"']?([^\s\"';&|]*)")
"""As a script or `env` sets it."""
_RELEASE = re.compile(r"vllm[\w.-]*:v?(\d+)\.(\d+)")


def engine_index(pod: Mapping[str, Any]) -> int:
    """Return the index of vLLM's container. Raises NotInjected when there is none or no single one."""
    containers = pod["spec"].get("containers") or []
    names = [container.get("name") for container in containers]
    annotations = pod["metadata"].get("annotations") or {}
    if (named := annotations.get(CONTAINER_ANNOTATION)) is not None:
        if named not in names:
            raise NotInjected(Reason.NO_VLLM_CONTAINER, f"the pod has no container {named!r} ({CONTAINER_ANNOTATION})")
        return names.index(named)
    found = [index for index, container in enumerate(containers) if looks_like_vllm(container)]
    if len(found) != 1:
        reason = Reason.SEVERAL_VLLM_CONTAINERS if found else Reason.NO_VLLM_CONTAINER
        count = "several containers" if found else "no container"
        raise NotInjected(reason, f"{count} of this pod run vLLM: name one with the annotation {CONTAINER_ANNOTATION}")
    return found[0]


def sidecar_user(pod: Mapping[str, Any], container: Mapping[str, Any]) -> tuple[int, int | None] | None:
    """Return user and group the sidecar must run as to share files with the engine; None: its own are fine.

    Files the sidecar makes are for its user to write. Root may, as long as it has CAP_DAC_OVERRIDE; any other user must
    be the same. Raises NotInjected when the engine's user is somebody unknown, or a root that may not.
    """
    of_pod, own = pod["spec"].get("securityContext") or {}, container.get("securityContext") or {}
    user = own.get("runAsUser", of_pod.get("runAsUser"))
    if user:
        return int(user), own.get("runAsGroup", of_pod.get("runAsGroup"))
    if user is None and own.get("runAsNonRoot", of_pod.get("runAsNonRoot", False)):
        raise NotInjected(Reason.USER, "only the image sets the engine's user: set securityContext.runAsUser")
    dropped = {str(name).upper().removeprefix("CAP_") for name in (own.get("capabilities") or {}).get("drop") or []}
    added = {str(name).upper().removeprefix("CAP_") for name in (own.get("capabilities") or {}).get("add") or []}
    if dropped & {"ALL", "DAC_OVERRIDE"} and "DAC_OVERRIDE" not in added:
        raise NotInjected(
            Reason.USER,
            "the engine runs as its image's user, or as root without CAP_DAC_OVERRIDE, and cannot use the "
            "sidecar's files: set securityContext.runAsUser to a user other than root",
        )
    return None


def check_front_end(container: Mapping[str, Any]) -> None:
    """Raise NotInjected where vLLM's Rust front end is asked for: with our `--middleware` vLLM would not start.

    vLLM 0.32 envs.py reads the variable as `bool(int(value))`. `envFrom` cannot be seen here.
    """
    env = container.get("env") or []
    known = {item["name"]: str(item.get("value", "")) for item in env if "valueFrom" not in item}
    asked = [item for item in env if item["name"] == _RUST_FRONT_END][-1:]  # the last of a name counts
    values = [*expanded((str(item.get("value", "")) for item in asked if "valueFrom" not in item), known)]
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    values += (found[1] for word in words for found in _RUST_IN_SCRIPT.finditer(str(word)))
    if any("valueFrom" in item for item in asked) or not all(map(_is_off, values)):
        raise NotInjected(
            Reason.RUST_FRONTEND,
            f"vLLM's Rust front end takes no --middleware, which context-cache needs: remove {_RUST_FRONT_END}",
        )


def _is_off(value: str) -> bool:
    try:
        return not value.strip() or int(value) == 0
    except ValueError:
        return False


def version_warning(container: Mapping[str, Any]) -> str:
    """Return what to say of the vLLM that an image's tag names; nothing where it names none, or one that was tested.

    Raises NotInjected when it is too old: it would start, and carry nothing.
    """
    name = str(container.get("image", "")).partition("@")[0].rpartition("/")[2]
    if (found := _RELEASE.match(name)) is None:
        return ""
    version = int(found[1]), int(found[2])
    said = f"vLLM {version[0]}.{version[1]}"
    if version < OLDEST_VLLM:
        raise NotInjected(Reason.VLLM_VERSION, f"{said} is older than {OLDEST_VLLM[0]}.{OLDEST_VLLM[1]}")
    if version > NEWEST_VLLM:
        return f"context-cache: {said} is newer than the versions that this release was tested with"
    return ""
