"""Decides about one pod and makes the patch: read this first. Pure.

What a pod gets, in this order:

- init containers, before its own: `context-cache-payload`, which copies the plugin, then `kv-sidecar`, which stays.
  First, because they need nothing from the others and the sidecar reads its disk while, say, a model is downloaded;
  and because native sidecars end in reverse order, so that it is there until the engine's last save.
- on vLLM's container: the arguments, the env, the mounts, PYTHONPATH.
- volumes, image pull secrets, the label its release's Service selects by, the annotation that says it was done.

Whatever the pod's author set stays: an env variable of the same name, their /dev/shm or that they have none.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pod_injector.command_line import find_engine
from pod_injector.engine_container import check_front_end, engine_index, sidecar_user, version_warning
from pod_injector.engine_options import EngineOptions
from pod_injector.not_injected import NotInjected, Reason
from pod_injector.parts import PatchParts

ENGINES_LABEL = "context-cache.io/engines"
INJECT_LABEL = "context-cache.io/inject"
INJECTED_ANNOTATION = "context-cache.io/injected"
SKIPPED_ANNOTATION = "context-cache.io/inject-skipped"
CONFIG_FILE_ANNOTATION = "context-cache.io/config-file"
_PYTHON_PATH = "PYTHONPATH"
_FILE_MODE = 0o444
_GROUP = 65532
"""Group of the sidecar's files; whoever is in it opens its sockets."""
_EMPTY = "context-cache-no-token"
_ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Admission mounts the token of the pod's ServiceAccount into every container that has nothing there, ours included
when it looks again after the patch. Our containers ask no API server, so something empty is there."""
_RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": _GROUP,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""What the chart's own pods say for all their containers, and somebody else's pod may not."""


def injection_patch(pod: Mapping[str, Any], parts: PatchParts) -> list[dict[str, Any]] | None:
    """Return the patch that injects a pod; None when it is injected already. Raises NotInjected."""
    if _is_injected(pod, parts):
        return None
    _check_pod(pod, parts)
    injected = copy.deepcopy(dict(pod))
    _inject(injected, parts)
    return _patch(pod, injected)


def skip_patch(pod: Mapping[str, Any], reason: Reason) -> list[dict[str, Any]]:
    """Return the patch that writes on a pod why it was left alone; empty when it says so already."""
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


def _is_injected(pod: Mapping[str, Any], parts: PatchParts) -> bool:
    # Both: an annotation may have been copied from a running pod into a template, without the container.
    marked = INJECTED_ANNOTATION in (pod["metadata"].get("annotations") or {})
    return marked and parts.sidecar["name"] in _names(pod, "initContainers")


def _check_pod(pod: Mapping[str, Any], parts: PatchParts) -> None:
    spec, labels = pod["spec"], pod["metadata"].get("labels") or {}
    if labels.get(INJECT_LABEL) != "true":
        raise NotInjected(Reason.OPTED_OUT, f"the pod lacks the label {INJECT_LABEL}: true")
    if labels.get(ENGINES_LABEL, parts.engines) != parts.engines:
        raise NotInjected(
            Reason.OTHER_RELEASE, f"the pod belongs to the release {labels[ENGINES_LABEL]!r} (label {ENGINES_LABEL})"
        )
    if spec.get("resources"):
        # Kubernetes 1.34: they must hold all containers together, or no pod is made at all.
        raise NotInjected(Reason.RESOURCES, "spec.resources leaves no room for a sidecar")
    if spec.get("hostNetwork"):
        raise NotInjected(Reason.HOST_NETWORK, "with hostNetwork other pods of the node may use the sidecar's ports")
    if (spec.get("os") or {}).get("name") == "windows":
        raise NotInjected(Reason.WINDOWS, "the sidecar runs only on Linux")
    taken = {parts.sidecar["name"], parts.payload["name"]} & {
        *_names(pod, "containers"),
        *_names(pod, "initContainers"),
    }
    taken |= {_EMPTY, *(volume["name"] for volume in parts.volumes)} & set(_names(pod, "volumes"))
    if taken:
        raise NotInjected(
            Reason.NAME_TAKEN, f"the pod already has containers or volumes with these names: {sorted(taken)}"
        )
    ports = _ports([*(spec.get("containers") or []), *(spec.get("initContainers") or [])]) & _ports([parts.sidecar])
    if ports:
        raise NotInjected(Reason.NAME_TAKEN, f"this pod already uses the sidecar's ports: {sorted(ports)}")


def _inject(pod: dict[str, Any], parts: PatchParts) -> None:
    spec = pod["spec"]
    index = engine_index(pod)
    engine = spec["containers"][index]
    version_warning(engine)
    command = find_engine(engine)
    check_front_end(engine)
    annotations = pod["metadata"].get("annotations") or {}
    EngineOptions(command.options).check(
        port=parts.port, https=parts.https, trusts_config_file=annotations.get(CONFIG_FILE_ANNOTATION) == "trusted"
    )
    ours = [copy.deepcopy(dict(container)) for container in (parts.payload, parts.sidecar)]
    _share_user(spec, ours, sidecar_user(pod, engine))
    for container in ours:
        mount = {"name": _EMPTY, "mountPath": _ACCOUNT_PATH, "readOnly": True}
        container["volumeMounts"] = [*container.get("volumeMounts", []), mount]
    volumes = [*_volumes(spec, parts), {"name": _EMPTY, "emptyDir": {}}]
    command.append(engine, parts.arguments)
    _add_env(engine, parts)
    _add_mounts(engine, parts)
    _follow_scheme(engine, parts)
    spec["initContainers"] = [*ours, *(spec.get("initContainers") or [])]
    spec["volumes"] = [*(spec.get("volumes") or []), *volumes]
    _add_pull_secrets(spec, parts)
    _mark(pod["metadata"], parts)


def _share_user(spec: dict[str, Any], ours: list[dict[str, Any]], user: tuple[int, int | None] | None) -> None:
    """Let the engine open the sidecar's sockets without changing the group of the pod's other volumes (fsGroup)."""
    for container in ours:
        container["securityContext"] = {**_RESTRICTED, **container.get("securityContext", {})}
        if user is not None:
            container["securityContext"] |= {
                "runAsUser": user[0],
                "runAsGroup": user[0] if user[1] is None else user[1],
            }
    if user is not None:
        return
    context = spec.get("securityContext") or {}
    groups = context.get("supplementalGroups") or []
    if _GROUP not in groups:
        spec["securityContext"] = {**context, "supplementalGroups": [*groups, _GROUP]}


def _volumes(spec: Mapping[str, Any], parts: PatchParts) -> list[dict[str, Any]]:
    """Return the volumes to add. Raises NotInjected when the sidecar could not write to its own."""
    volumes = [_readable(volume) for volume in parts.volumes]
    has_group = (spec.get("securityContext") or {}).get("fsGroup") is not None
    if not has_group and any({"persistentVolumeClaim", "ephemeral"} & volume.keys() for volume in volumes):
        raise NotInjected(
            Reason.FS_GROUP,
            "a claim for blocks belongs to root at first: set the pod's securityContext.fsGroup",
        )
    return volumes


def _readable(volume: Mapping[str, Any]) -> dict[str, Any]:
    """Return a volume whose secret files all containers of the pod may read: without fsGroup they are root's."""
    if "secret" not in volume:
        return dict(volume)
    return {**volume, "secret": {**volume["secret"], "defaultMode": _FILE_MODE}}


def _add_env(engine: dict[str, Any], parts: PatchParts) -> None:
    env = [dict(item) for item in engine.get("env") or []]
    path = next((item for item in env if item["name"] == _PYTHON_PATH), None)
    if path is None:
        env.append({"name": _PYTHON_PATH, "value": parts.python_path})
    elif "valueFrom" in path:
        raise NotInjected(Reason.NAME_TAKEN, "PYTHONPATH has no literal value and cannot be extended: give it one")
    else:
        path["value"] = ":".join(filter(None, (parts.python_path, path.get("value", ""))))
    taken = {item["name"] for item in env}
    engine["env"] = env + [copy.deepcopy(item) for item in parts.env if item["name"] not in taken]


def _add_mounts(engine: dict[str, Any], parts: PatchParts) -> None:
    mounts = list(engine.get("volumeMounts") or [])
    taken = {str(mount.get("mountPath", "")).rstrip("/") for mount in mounts}
    wanted = [dict(mount) for mount in parts.mounts]
    clash = [mount["mountPath"] for mount in wanted if mount["mountPath"].rstrip("/") in taken]
    if clash:
        raise NotInjected(Reason.NAME_TAKEN, f"the engine has other mounts at {', '.join(clash)}")
    engine["volumeMounts"] = mounts + wanted


def _follow_scheme(engine: dict[str, Any], parts: PatchParts) -> None:
    """Probe by HTTPS what now serves HTTPS. Raises NotInjected for a program: it may ask by HTTP, and kill for ever."""
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
    missing = [{"name": name} for name in parts.image_pull_secrets if {"name": name} not in there]
    if missing:
        spec["imagePullSecrets"] = [*there, *missing]


def _mark(metadata: dict[str, Any], parts: PatchParts) -> None:
    annotations = {**(metadata.get("annotations") or {}), INJECTED_ANNOTATION: parts.version}
    annotations.pop(SKIPPED_ANNOTATION, None)
    metadata["annotations"] = annotations
    metadata["labels"] = {**(metadata.get("labels") or {}), ENGINES_LABEL: parts.engines}


def _names(pod: Mapping[str, Any], field: str) -> list[str]:
    return [str(item.get("name")) for item in pod["spec"].get(field) or []]


def _ports(containers: list[dict[str, Any]]) -> set[int]:
    return {port["containerPort"] for container in containers for port in container.get("ports") or []}
