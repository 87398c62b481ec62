"""Decides about one pod and makes its patch: read this file first. Pure.

An injected pod gets:

- two init containers before its own: `context-cache-payload` copies the connector, and `kv-sidecar` keeps running. They
  come first because they need nothing from the others: the sidecar reads its disk while a model is downloaded. Native
  sidecars end in reverse order, so this one outlives the engine's last save.
- the container `turn`, last of its containers. It gets SIGTERM together with vLLM: a hook of vLLM that sleeps is its
  hook too.
- for vLLM's container: mounts, PYTHONPATH and one variable. Its command line stays: vLLM's process adds our arguments
  itself (`payload_start`), so a shell or a start script may come before it.
- volumes, image pull secrets, the label of its release's Service, and an annotation that marks it as injected.

Settings of the pod's author stay: their PYTHONPATH follows ours, and /dev/shm or its absence is theirs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pod_injector.engine_container import (
    NotInjected,
    Reason,
    check_version,
    check_written,
    engine_index,
    sidecar_user,
)
from pod_injector.parts import PatchParts
from pod_injector.payload_start.context_cache_start import ARGUMENTS_ENV

ENGINES_LABEL = "context-cache.io/engines"
INJECT_LABEL = "context-cache.io/inject"
INJECTED_ANNOTATION = "context-cache.io/injected"
SKIPPED_ANNOTATION = "context-cache.io/inject-skipped"
_PYTHON_PATH = "PYTHONPATH"
_FILE_MODE = 0o444
_GROUP = 65532
"""Group of the sidecar's files: its members may open its sockets."""
_EMPTY = "context-cache-no-token"
_NO_TOKEN = {"name": _EMPTY, "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True}
"""Mount of an empty volume at the path of the ServiceAccount's token. Admission mounts the token into each container
without a mount there, ours included. Our containers never call the API server."""
_RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": _GROUP,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Security context of the chart's own pods. An injected pod may lack it, so our containers bring it."""


def injection_patch(pod: Mapping[str, Any], parts: PatchParts) -> list[dict[str, Any]] | None:
    """Return the patch that injects a pod; None if it is injected already. Raises NotInjected."""
    # Both: a template may have the annotation copied from a running pod, without the container.
    is_marked = INJECTED_ANNOTATION in (pod["metadata"].get("annotations") or {})
    if is_marked and parts.sidecar["name"] in _names(pod["spec"], "initContainers"):
        return None
    _check_pod(pod, parts)
    injected = copy.deepcopy(dict(pod))
    _inject(injected, parts)
    return _patch(pod, injected)


def skip_patch(pod: Mapping[str, Any], reason: Reason) -> list[dict[str, Any]]:
    """Return the patch that writes the reason into the pod's annotation; empty if it is there already."""
    marked = copy.deepcopy(dict(pod))
    metadata = marked.setdefault("metadata", {})
    metadata["annotations"] = {**(metadata.get("annotations") or {}), SKIPPED_ANNOTATION: reason.value}
    return _patch(pod, marked)


def _patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the changed halves of a pod as whole values. The API server calls one webhook after the other."""
    return [
        {"op": "add", "path": f"/{half}", "value": after[half]}
        for half in ("metadata", "spec")
        if before.get(half) != after.get(half)
    ]


def _check_pod(pod: Mapping[str, Any], parts: PatchParts) -> None:
    spec, labels = pod["spec"], pod["metadata"].get("labels") or {}
    if labels.get(INJECT_LABEL) != "true":
        raise NotInjected(Reason.OPTED_OUT, f"the pod lacks the label {INJECT_LABEL}: true")
    if labels.get(ENGINES_LABEL, parts.engines) != parts.engines:
        raise NotInjected(
            Reason.OTHER_RELEASE, f"the pod belongs to the release {labels[ENGINES_LABEL]!r} (label {ENGINES_LABEL})"
        )
    if spec.get("resources"):
        # Kubernetes 1.34 rejects a pod whose containers together request more.
        raise NotInjected(Reason.RESOURCES, "spec.resources leaves no room for a sidecar")
    if spec.get("hostNetwork"):
        raise NotInjected(Reason.HOST_NETWORK, "with hostNetwork other pods of the node may use the sidecar's ports")
    if (spec.get("os") or {}).get("name") == "windows":
        raise NotInjected(Reason.WINDOWS, "the sidecar runs only on Linux")
    ours = (parts.payload, parts.sidecar, parts.turn)
    taken = {container["name"] for container in ours} & _names(spec, "containers", "initContainers")
    taken |= {_EMPTY, *(volume["name"] for volume in parts.volumes)} & _names(spec, "volumes")
    if taken:
        raise NotInjected(
            Reason.NAME_TAKEN, f"the pod already has containers or volumes with these names: {sorted(taken)}"
        )
    ports = _ports([*(spec.get("containers") or []), *(spec.get("initContainers") or [])]) & _ports(ours)
    if ports:
        raise NotInjected(
            Reason.NAME_TAKEN, f"this pod already uses ports of the sidecar or of the turn process: {sorted(ports)}"
        )


def _inject(pod: dict[str, Any], parts: PatchParts) -> None:
    spec, metadata = pod["spec"], pod["metadata"]
    engine = spec["containers"][engine_index(pod)]
    check_version(engine)
    check_written(engine, parts)
    user = sidecar_user(pod, engine)
    if not user:
        _join_group(spec)
    _check_claims(spec, parts)
    _add_env(engine, parts)
    _add_mounts(engine, parts)
    _follow_scheme(engine, parts)
    payload, sidecar, turn = (_our_container(one, user) for one in (parts.payload, parts.sidecar, parts.turn))
    spec["initContainers"] = [payload, sidecar, *(spec.get("initContainers") or [])]
    spec["containers"].append({**turn, **_sleep_hook(engine)})
    spec["volumes"] = [*(spec.get("volumes") or []), *map(_readable, parts.volumes), {"name": _EMPTY, "emptyDir": {}}]
    _add_pull_secrets(spec, parts)
    annotations = {**(metadata.get("annotations") or {}), INJECTED_ANNOTATION: parts.version}
    annotations.pop(SKIPPED_ANNOTATION, None)
    metadata["annotations"] = annotations
    metadata["labels"] = {**(metadata.get("labels") or {}), ENGINES_LABEL: parts.engines}


def _join_group(spec: dict[str, Any]) -> None:
    """Let the engine open the sidecar's sockets. `fsGroup` would change the group of the pod's other volumes too."""
    context = spec.get("securityContext") or {}
    groups = context.get("supplementalGroups") or []
    if _GROUP not in groups:
        spec["securityContext"] = {**context, "supplementalGroups": [*groups, _GROUP]}


def _check_claims(spec: Mapping[str, Any], parts: PatchParts) -> None:
    """Raise NotInjected if the sidecar could not write to its own volume."""
    has_group = (spec.get("securityContext") or {}).get("fsGroup") is not None
    if not has_group and any({"persistentVolumeClaim", "ephemeral"} & volume.keys() for volume in parts.volumes):
        raise NotInjected(
            Reason.FS_GROUP, "a claim for blocks belongs to root at first: set the pod's securityContext.fsGroup"
        )


def _our_container(container: Mapping[str, Any], user: Mapping[str, int]) -> dict[str, Any]:
    return {
        **container,
        "securityContext": {**_RESTRICTED, **container.get("securityContext", {}), **user},
        "volumeMounts": [*container.get("volumeMounts", []), _NO_TOKEN],
    }


def _sleep_hook(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's hook if it sleeps; empty for a hook that runs a program of vLLM's image, or asks its port."""
    hook = (engine.get("lifecycle") or {}).get("preStop") or {}
    return {"lifecycle": {"preStop": {"sleep": hook["sleep"]}}} if "sleep" in hook else {}


def _readable(volume: dict[str, Any]) -> dict[str, Any]:
    """Return a volume whose secret files every user may read: without fsGroup they belong to root."""
    return volume | {"secret": volume["secret"] | {"defaultMode": _FILE_MODE}} if "secret" in volume else volume


def _add_env(engine: dict[str, Any], parts: PatchParts) -> None:
    # A template may have our variable copied from a running pod.
    env = [item for item in engine.get("env") or [] if item["name"] != ARGUMENTS_ENV]
    path = next((item for item in env if item["name"] == _PYTHON_PATH), None)
    if path is None:
        env.append({"name": _PYTHON_PATH, "value": parts.python_path})
    elif "valueFrom" in path:
        raise NotInjected(Reason.NAME_TAKEN, "PYTHONPATH has no literal value and cannot be extended: give it one")
    else:
        path["value"] = ":".join(filter(None, (parts.python_path, path.get("value", ""))))
    at_start = json.dumps({"arguments": parts.arguments, "port": parts.port, "https": parts.https})
    # Kubernetes replaces $(NAME) in values; $$ is its escape.
    engine["env"] = [*env, {"name": ARGUMENTS_ENV, "value": at_start.replace("$(", "$$(")}]


def _add_mounts(engine: dict[str, Any], parts: PatchParts) -> None:
    mounts = engine.get("volumeMounts") or []
    taken = {str(mount.get("mountPath", "")).rstrip("/") for mount in mounts}
    clash = [mount["mountPath"] for mount in parts.mounts if mount["mountPath"].rstrip("/") in taken]
    if clash:
        raise NotInjected(Reason.NAME_TAKEN, f"the engine has other mounts at {', '.join(clash)}")
    engine["volumeMounts"] = [*mounts, *parts.mounts]


def _follow_scheme(engine: dict[str, Any], parts: PatchParts) -> None:
    """Switch probes and hooks to HTTPS. Raises NotInjected for an exec probe, which may use HTTP and fail for ever."""
    if not parts.https:
        return
    names = {port.get("name") for port in engine.get("ports") or [] if port.get("containerPort") == parts.port}
    probes = [engine.get(probe) or {} for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    if any("exec" in probe for probe in probes):
        raise NotInjected(Reason.SERVER, "vLLM would serve HTTPS, and an exec probe may use HTTP")
    hooks = [(engine.get("lifecycle") or {}).get(hook) or {} for hook in ("postStart", "preStop")]
    for request in (each["httpGet"] for each in (*probes, *hooks) if "httpGet" in each):
        if request.get("port") in {parts.port, str(parts.port), *names}:
            request["scheme"] = "HTTPS"


def _add_pull_secrets(spec: dict[str, Any], parts: PatchParts) -> None:
    there = spec.get("imagePullSecrets") or []
    if missing := [{"name": name} for name in parts.image_pull_secrets if {"name": name} not in there]:
        spec["imagePullSecrets"] = [*there, *missing]


def _names(spec: Mapping[str, Any], *fields: str) -> set[str]:
    return {str(item.get("name")) for field in fields for item in spec.get(field) or []}


def _ports(containers: Iterable[Mapping[str, Any]]) -> set[int]:
    return {port["containerPort"] for container in containers for port in container.get("ports") or []}
