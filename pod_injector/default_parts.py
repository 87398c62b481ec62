"""The parts of a release with the chart's default values, as far as they decide about a pod.

For a look at manifests before anything is installed. Env, resources and probes are left out: they decide nothing, and a
release has its own (`INJECTOR_PARTS_FILE`, the ConfigMap `<release>-injector`).
"""

from __future__ import annotations

from pod_injector.parts import PatchParts, with_own_names

_VERSION = "your-version"
_IMAGE = f"registry.example/context-cache:{_VERSION}"
_SOCKETS = "/run/context-cache"
_BLOCKS = "/var/lib/context-cache"
_SIGNING = "/etc/context-cache/signing"
_PAYLOAD = "/opt/context-cache/payload-copy"


def default_parts() -> PatchParts:
    """Return the parts of a release called `context-cache`, with a registry that does not exist."""
    return with_own_names(
        PatchParts(
            version=_VERSION,
            engines="context-cache",
            port=8000,
            payload={
                "name": "context-cache-payload",
                "image": _IMAGE,
                "args": ["serve", "injector", "payload", _PAYLOAD],
                "volumeMounts": [{"name": "payload", "mountPath": _PAYLOAD}],
            },
            sidecar={
                "name": "kv-sidecar",
                "image": _IMAGE,
                "args": ["serve", "sidecar"],
                "restartPolicy": "Always",
                "ports": [
                    {"name": "kv-grpc", "containerPort": 50061},
                    {"name": "kv-metrics", "containerPort": 9091},
                ],
                "volumeMounts": [
                    {"name": "kv-run", "mountPath": _SOCKETS},
                    {"name": "kv-blocks", "mountPath": _BLOCKS},
                ],
            },
            volumes=(
                {"name": "kv-run", "emptyDir": {}},
                {"name": "kv-blocks", "emptyDir": {"sizeLimit": "20Gi"}},
                {"name": "signing", "secret": {"secretName": "context-cache-signing"}},
                {"name": "payload", "emptyDir": {"sizeLimit": "512Mi"}},
            ),
            env=({"name": "TURN_SIDECAR", "value": f"unix://{_SOCKETS}/sidecar.sock"},),
            mounts=(
                {"name": "kv-run", "mountPath": _SOCKETS},
                {"name": "signing", "mountPath": _SIGNING, "readOnly": True},
                {"name": "payload", "mountPath": _PAYLOAD, "readOnly": True},
            ),
            arguments=(
                "--middleware",
                "vllm_plugin.turn.middleware.TurnMiddleware",
                "--kv-transfer-config",
                '{"kv_connector":"ContextCacheConnector"}',
                "--enable-prompt-tokens-details",
            ),
            python_path=f"{_PAYLOAD}/start",
        )
    )
