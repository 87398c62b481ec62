"""Finds vLLM's container in a pod, and checks the parts of it that a manifest shows. Names the reasons. Pure.

A shell or start script may still change vLLM's arguments and environment. `payload_start/context_cache_start.py`
checks the real ones when vLLM starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Any

from pod_injector.parts import PatchParts
from pod_injector.payload_start.context_cache_start import (
    API_SERVER,
    COMMAND_LINE,
    RUST_FRONT_END_ENV,
    read_options,
    refusal,
)

CONTAINER_ANNOTATION = "context-cache.io/container"
"""Names vLLM's container if the injector finds none or several."""

OLDEST_VLLM, NEWEST_VLLM = (0, 32), (0, 32)
"""Versions that the contract was tested with: `make test-vllm VLLM=…`, docs/operations/install.md."""
_RELEASE = re.compile(r"vllm[\w.-]*:v?(\d+)\.(\d+)")
_STARTS_VLLM = re.compile(rf"\bvllm\s+serve\b|\b({re.escape(API_SERVER)}|{re.escape(COMMAND_LINE)})\b")
_PROGRAM = re.compile(r"(^|/)([a-z]*sh|python[0-9.]*)$|\.(sh|py)$")
"""First of `args` that is a program instead of vLLM's first argument: a shell, Python or a script."""


class Reason(StrEnum):
    """Reason for which a pod is left alone: the annotation `context-cache.io/inject-skipped` and the metric's label."""

    OPTED_OUT = "opted-out"
    OTHER_RELEASE = "other-release"
    HOST_NETWORK = "host-network"
    WINDOWS = "windows"
    NO_VLLM_CONTAINER = "no-vllm-container"
    SEVERAL_VLLM_CONTAINERS = "several-vllm-containers"
    KV_CONNECTOR = "kv-connector"
    PORT = "port"
    SERVER = "server"
    RUST_FRONTEND = "rust-frontend"
    NAME_TAKEN = "name-taken"
    USER = "user"
    RESOURCES = "resources"
    FS_GROUP = "fs-group"
    VLLM_VERSION = "vllm-version"
    FAULT = "fault"


class NotInjected(Exception):
    """The pod is left alone. Not in the tree of errors: no process sends it to another."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def engine_index(pod: Mapping[str, Any]) -> int:
    """Return the index of vLLM's container. Raises NotInjected unless there is exactly one."""
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


def looks_like_vllm(container: Mapping[str, Any]) -> bool:
    """Return whether a container seems to run vLLM, by its image's name or its command line."""
    return "vllm" in _image_name(container) or _STARTS_VLLM.search(" ".join(_words(container))) is not None


def written_arguments(container: Mapping[str, Any]) -> list[str] | None:
    """Return vLLM's arguments as the manifest spells them out; None: a script or the image knows them."""
    words = _words(container)
    for index, (word, following) in enumerate(pairwise(words)):
        is_command = (word.rpartition("/")[2], following) == ("vllm", "serve")
        if is_command or (word == "-m" and following in {API_SERVER, COMMAND_LINE}):
            return words[index + 2 :]
    # Without `command` the image's entry point runs, which is `vllm serve` or the API server.
    return words if words and not container.get("command") and not _PROGRAM.search(words[0]) else None


def check_written(container: Mapping[str, Any], parts: PatchParts) -> None:
    """Raise NotInjected if the manifest itself shows that the release could not use this engine.

    A value with a variable of Kubernetes, `$(NAME)`, is known only when vLLM starts.
    """
    env = {item["name"]: str(item.get("value", "")) for item in container.get("env") or []}
    rust = env.get(RUST_FRONT_END_ENV, "")
    words = written_arguments(container)
    options = {"port": str(parts.port)} if words is None else read_options(words)
    if "config" in options:
        options.setdefault("port", str(parts.port))  # the file may set it
    found = refusal(options, rust="" if "$(" in rust else rust, port=parts.port, https=parts.https)
    if found is not None:
        reason, message = found
        raise NotInjected(Reason(reason), message)


def sidecar_user(pod: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, int]:
    """Return the `securityContext` with which the sidecar can share files with the engine; empty: its own works.

    The sidecar's files are writable for its user only. Root may write them with CAP_DAC_OVERRIDE. Raises NotInjected
    if the engine's user is unknown, or is root without that right.
    """
    own = container.get("securityContext") or {}
    context = {**(pod["spec"].get("securityContext") or {}), **own}
    if user := context.get("runAsUser"):
        group = context.get("runAsGroup")
        return {"runAsUser": int(user), "runAsGroup": int(user if group is None else group)}
    if user is None and context.get("runAsNonRoot"):
        raise NotInjected(Reason.USER, "only the image sets the engine's user: set securityContext.runAsUser")
    dropped, added = (
        {str(name).upper().removeprefix("CAP_") for name in (own.get("capabilities") or {}).get(change) or []}
        for change in ("drop", "add")
    )
    if dropped & {"ALL", "DAC_OVERRIDE"} and "DAC_OVERRIDE" not in added:
        raise NotInjected(
            Reason.USER,
            "the engine runs as its image's user, or as root without CAP_DAC_OVERRIDE, and cannot use the "
            "sidecar's files: set securityContext.runAsUser to a user other than root",
        )
    return {}


def check_version(container: Mapping[str, Any]) -> None:
    """Raise NotInjected for a vLLM that is too old: it would start, and ignore contexts."""
    if (version := _version(container)) is not None and version < OLDEST_VLLM:
        raise NotInjected(Reason.VLLM_VERSION, f"vLLM {_dotted(version)} is older than {_dotted(OLDEST_VLLM)}")


def warning_about(container: Mapping[str, Any]) -> str:
    """Return the doubts about an engine that is injected all the same; empty if there are none."""
    doubts = []
    if (version := _version(container)) is not None and version > NEWEST_VLLM:
        doubts.append(f"vLLM {_dotted(version)} is newer than the versions that this release was tested with")
    words = written_arguments(container)
    if words is None or "config" in read_options(words) or any("$(" in word for word in words):
        doubts.append("the pod does not spell out vLLM's arguments: port and KV connector are checked when vLLM starts")
    return "; ".join(doubts)


def _version(container: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the version in the image's tag; None: the tag has none."""
    found = _RELEASE.match(_image_name(container))
    return None if found is None else (int(found[1]), int(found[2]))


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _words(container: Mapping[str, Any]) -> list[str]:
    return [*(container.get("command") or []), *(container.get("args") or [])]


def _image_name(container: Mapping[str, Any]) -> str:
    return str(container.get("image", "")).partition("@")[0].rpartition("/")[2]
