"""What is installed: SmolLM2 on the CPU, a store of the chart's own, Envoy in front; plain, or with TLS everywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme
from pydantic.alias_generators import to_camel

from tests.chart.releases import merged
from tests.chart.rendering import Document
from tests.kit.patience import CONNECTOR, PARTS
from tests.kit.rendered.cluster import Given

MODEL = "smollm2"
FRONT_NAME = "llm.example.org"
PARTS_NAME = "context-cache"
_SECTIONS = {
    "GATEWAY_": ("gateway", "settings"),
    "MANAGER_": ("contextManager", "settings"),
    "SIDECAR_": ("sidecar", "settings"),
    "TURN_": ("engine", "turn"),
}
_ENGINE = {
    "model": f"/models/{MODEL}",
    "servedModelName": MODEL,
    "dtype": "float32",
    "blockSize": 32,
    "maxModelLen": 4096,
    "gpu": {"count": 0},
    "cpuKvCacheGiB": 1,
    "modelCache": {"existingClaim": "models"},
    "connector": CONNECTOR,
    "extraArgs": ["--enforce-eager", "--max-num-batched-tokens=1024"],
    "pod": {
        "extraEnv": [
            {"name": "HF_HUB_OFFLINE", "value": "1"},
            # Threads that wait for each other in loops make a busy machine ten times slower.
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ]
    },
}
_TLS = {
    "tls": {"enabled": True, "existingSecret": "parts-tls"},
    "envoy": {"tls": {"existingSecret": "front-tls"}},
    "tests": {"serverName": FRONT_NAME, "caSecret": "front-tls"},
}


@dataclass(frozen=True)
class Scenario:
    """Values, and what they refer to. `front_ca`: PEM, who signed Envoy's certificate; empty: no TLS."""

    values: Mapping[str, Any]
    given: Given
    front_ca: bytes = b""


def scenario(
    models: Path, *, tls: bool, more: Mapping[str, Any] | None = None, claims: Mapping[str, Path] | None = None
) -> Scenario:
    """Return one; `models` is the folder that has `MODEL`, `claims` are folders that `more` values claim by name."""
    claims = {"models": models, **(claims or {})}
    if not tls:
        return Scenario(merged(_values(), more or {}), Given(claims=claims))
    parts, front = trustme.CA(), trustme.CA()
    secrets = (_certificate("parts-tls", parts, PARTS_NAME), _certificate("front-tls", front, FRONT_NAME))
    return Scenario(merged(_values(), _TLS), Given(secrets, claims), front.cert_pem.bytes())


def _values() -> dict[str, Any]:
    own = {
        "engine": _ENGINE,
        # Answers that run when a pod ends may be slow.
        "gateway": {"settings": {"drainTimeoutS": 120}},
        "envoy": {"settings": {"pluginTimeoutS": 60, "connectTimeoutS": 20}},
        "sidecar": {"memoryLimit": "256Mi"},
        "monitoring": {"podMonitor": {"enabled": True}},
    }
    # Bounds of a sidecar are no setting: only a test's own program reads them.
    return merged(own, *(_patience(name, value) for name, value in PARTS.items() if name != "SIDECAR_BOUNDS"))


def _patience(name: str, value: str) -> dict[str, Any]:
    """Return a variable of a part as the value that sets it."""
    prefix = f"{name.partition('_')[0]}_"
    section, key = _SECTIONS[prefix]
    return {section: {key: {to_camel(name.removeprefix(prefix).lower()): json.loads(value)}}}


def _certificate(secret: str, ca: trustme.CA, name: str) -> Document:
    leaf = ca.issue_cert(name)
    content = {
        "tls.crt": b"".join(pem.bytes() for pem in leaf.cert_chain_pems),
        "tls.key": leaf.private_key_pem.bytes(),
        "ca.crt": ca.cert_pem.bytes(),
    }
    return {
        "kind": "Secret",
        "metadata": {"name": secret},
        "stringData": {key: value.decode() for key, value in content.items()},
    }
