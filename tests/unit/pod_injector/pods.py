"""Pods and parts for tests of the injector, and an applier of RFC 6902 patches that is not the one that made them."""

from __future__ import annotations

import copy
from typing import Any

from pod_injector.parts import PatchParts, with_own_names

TRANSFER = '{"kv_connector": "ContextCacheConnector"}'
ARGUMENTS = ("--kv-transfer-config", TRANSFER, "--enable-prompt-tokens-details")


def make_parts(**changes: Any) -> PatchParts:
    """Return parts as the chart writes them, shortened."""
    values: dict[str, Any] = {
        "version": "0.1.0",
        "engines": "cc-context-cache",
        "port": 8000,
        "payload": {
            "name": "context-cache-payload",
            "image": "context-cache:0.1.0",
            "args": ["injector", "payload", "/payload"],
            "securityContext": {"allowPrivilegeEscalation": False},
            "volumeMounts": [{"name": "payload", "mountPath": "/payload"}],
        },
        "sidecar": {
            "name": "kv-sidecar",
            "image": "context-cache:0.1.0",
            "restartPolicy": "Always",
            "args": ["sidecar"],
            "env": [{"name": "SIDECAR_MEMORY_LIMIT_BYTES", "value": str(4 << 30)}],
            "ports": [{"name": "kv-grpc", "containerPort": 50061}],
            "securityContext": {"allowPrivilegeEscalation": False},
            "volumeMounts": [{"name": "kv-run", "mountPath": "/run/context-cache"}],
        },
        "turn": {
            "name": "turn",
            "image": "context-cache:0.1.0",
            "args": ["turn"],
            "env": [{"name": "TURN_SIDECAR", "value": "unix:///run/context-cache/sidecar.sock"}],
            "ports": [{"name": "turn", "containerPort": 8010}],
            "securityContext": {"allowPrivilegeEscalation": False},
            "volumeMounts": [{"name": "kv-run", "mountPath": "/run/context-cache"}],
        },
        "volumes": [
            {"name": "kv-run", "emptyDir": {}},
            {"name": "signing", "secret": {"secretName": "cc-signing", "defaultMode": 0o440}},
            {"name": "payload", "emptyDir": {}},
        ],
        "mounts": [
            {"name": "kv-run", "mountPath": "/run/context-cache"},
            {"name": "signing", "mountPath": "/etc/context-cache/signing", "readOnly": True},
            {"name": "payload", "mountPath": "/payload", "readOnly": True},
        ],
        "arguments": ARGUMENTS,
        "python_path": "/payload/start",
    }
    return with_own_names(PatchParts.model_validate(values | changes))


def make_pod(*containers: dict[str, Any], annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a pod that asks for the injection; without containers one vLLM as most people run it."""
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "llama-", "labels": {"app": "llama", "context-cache.io/inject": "true"}},
        "spec": {"containers": list(containers) or [make_engine()], **spec},
    }
    if annotations is not None:
        pod["metadata"]["annotations"] = annotations
    return pod


def make_engine(**changes: Any) -> dict[str, Any]:
    """Return vLLM's container with the image's own entry point."""
    container: dict[str, Any] = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.32.0",
        "args": ["--model", "meta-llama/Llama-3.1-8B-Instruct"],
    }
    container |= changes
    return {key: value for key, value in container.items() if value is not None}


def apply_patch(document: Any, patch: list[dict[str, Any]]) -> Any:
    """Return a document after a patch of `add`, `replace` and `remove`; strict: what is not there is an error."""
    root = {"": copy.deepcopy(document)}
    for operation in patch:
        parent: Any = root
        *above, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")]
        for part in above:
            parent = parent[int(part)] if isinstance(parent, list) else parent[part]
        _apply(parent, last, operation)
    return root[""]


def _apply(parent: Any, key: str, operation: dict[str, Any]) -> None:
    kind = operation["op"]
    if isinstance(parent, list):
        index = int(key)
        assert 0 <= index <= len(parent) - (kind != "add"), operation
        if kind == "add":
            parent.insert(index, copy.deepcopy(operation["value"]))
            return
        parent.pop(index)
        if kind == "replace":
            parent.insert(index, copy.deepcopy(operation["value"]))
        return
    assert kind == "add" or key in parent, operation
    if kind == "remove":
        del parent[key]
    else:
        parent[key] = copy.deepcopy(operation["value"])
