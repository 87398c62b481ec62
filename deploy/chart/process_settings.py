"""Settings of the processes as values of the chart: every field has one way in, and this file says which.

`gateway.settings` and its like take the fields of the settings class in camelCase, 1:1, `engine.connector` the keys of
the connector in their own spelling. Those listed here are not among them: the chart sets them from other values, or
nobody does on Kubernetes. tests/chart compares both ways.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from pathlib import Path
from runpy import run_path
from typing import Any

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from context_manager.settings import ManagerSettings
from gateway.envoy.settings import EnvoySettings
from gateway.settings import GatewaySettings
from kv_sidecar.settings import SidecarSettings
from pod_injector.settings import InjectorSettings
from vllm_plugin.turn.settings import TurnSettings

PROCESSES: Mapping[str, type[BaseModel]] = {
    "GATEWAY_": GatewaySettings,
    "MANAGER_": ManagerSettings,
    "SIDECAR_": SidecarSettings,
    "TURN_": TurnSettings,
    "INJECTOR_": InjectorSettings,
    "ENVOY_": EnvoySettings,
}
"""By prefix of the variables."""
_CONNECTOR_SOURCE = Path(__file__).parents[2] / "vllm_plugin" / "connector" / "settings.py"
_JSON_TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": "integer", "minimum": 1},
    "str": {"type": "string"},
    "bool": {"type": "boolean"},
}

_FIXED = "fixed: ports, paths and addresses in pods are the chart's own"
_UNUSED = "never set: means something on other platforms only"
_TLS = dict.fromkeys(("tls_cert_file", "tls_key_file", "tls_ca_file", "tls_server_name"), "tls")
_TRACES = {"traces_endpoint": "tracing.endpoint", "traces_sample_ratio": "tracing.sampleRatio"}
_EVERYWHERE = {**_TLS, **_TRACES}
_METRICS = {"metrics_host": _FIXED, "metrics_port": _FIXED}

CHART_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "GATEWAY_": {
        **_EVERYWHERE,
        **_METRICS,
        "host": _FIXED,
        "port": _FIXED,
        "manager": "the release's context managers",
        "endpoints": _UNUSED,
        "endpoints_file": _UNUSED,
        "kubernetes_service_selector": "the release's Service of vLLM pods",
        "kubernetes_namespace": "the release's namespace",
        "kubernetes_port_name": _FIXED,
        "kubernetes_sidecar_port_name": _FIXED,
        "kubernetes_turn_port_name": _FIXED,
        "kubernetes_scheme": "tls.enabled",
        "tls_clients": "envoy.mode: whoever stands in front has a certificate or has none",
        "ext_proc_listen": "envoy.mode",
        "secret_file": "signing",
        "api_keys_file": "auth",
        "drain_delay_s": "gateway.drainDelayS",
        "log_level": "logLevel",
    },
    "MANAGER_": {
        **_EVERYWHERE,
        **_METRICS,
        "listen": _FIXED,
        "redis_url": "redis, valkey",
        "redis_ca_file": "redis.tlsSecret",
        "redis_cert_file": "redis.clientCertificate",
        "redis_key_file": "redis.clientCertificate",
        "log_level": "logLevel",
    },
    "SIDECAR_": {
        **_EVERYWHERE,
        **_METRICS,
        "unix_socket": _FIXED,
        "listen": _FIXED,
        "data_dir": _FIXED,
        "memory_limit_bytes": "sidecar.memoryLimit",
        "disk_limit_bytes": "sidecar.diskLimit",
        "manager": "the release's context managers",
        "peers": "sidecar.peers, sidecar.peerNetworks",
        "endpoint_name": "the pod's name",
        "handover_address": "the pod's address",
        "handover_peers": "sidecar.peers",
        "log_level": "logLevel",
    },
    "TURN_": {
        **_EVERYWHERE,
        "engine_url": _FIXED,
        "listen_host": _FIXED,
        "listen_port": _FIXED,
        "log_level": "logLevel",
        "manager": "the release's context managers",
        "sidecar": _FIXED,
        "lmcache_model": "engine.model",
        "lmcache_world_size": "engine.tensorParallelSize",
        "lmcache_listen": _FIXED,
        "secret_file": "signing",
        "endpoint_name": "the pod's name",
    },
    "INJECTOR_": {
        **_METRICS,
        "host": _FIXED,
        "port": _FIXED,
        "cert_file": "injector.tls",
        "key_file": "injector.tls",
        "parts_file": _FIXED,
        "request_timeout_s": "injector.timeoutSeconds",
        "log_level": "logLevel",
    },
    "ENVOY_": {
        **_EVERYWHERE,
        "gateways": "the release's gateways",
        "pods": "the release's Service of vLLM pods",
        "engines": "the release's Service of vLLM pods",
        "listen_host": _FIXED,
        "listen_port": _FIXED,
        "listen_cert_file": "envoy.tls",
        "listen_key_file": "envoy.tls",
        "metrics_listen": _FIXED,
        "admin_host": _FIXED,
        "admin_port": _FIXED,
        "config_dir": _FIXED,
        "api_keys_file": "auth",
        "drain_delay_s": "envoy.drainDelayS",
        "drain_timeout_s": "envoy.drainTimeoutS",
        "log_level": "logLevel",
        "engine_paths": "gateway.settings.enginePaths: both must know the same",
        "cors_origins": "gateway.settings.corsOrigins: both must know the same",
        "max_body_bytes": "gateway.settings.maxBodyBytes: both must have the same",
    },
}
"""Prefix of a process's settings → field → which value of the chart sets it, and why."""
CHART_CONNECTOR_KEYS = {
    "sidecar": "the socket in the pod",
    "secret_file": "signing",
    "traces_endpoint": "tracing.endpoint",
}
"""Keys that the chart sets, and from what."""


def settings_schema(prefix: str) -> dict[str, Any]:
    """Return the JSON schema of the map of a process's settings: the fields the chart leaves to its user."""
    properties = PROCESSES[prefix].model_json_schema()["properties"]
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            to_camel(name): {key: value for key, value in schema.items() if key not in {"title", "writeOnly"}}
            | {"description": " ".join(schema["description"].split())}
            for name, schema in properties.items()
            if name not in CHART_SETTINGS[prefix]
        },
    }


def connector_schema() -> dict[str, Any]:
    """Return the JSON schema of the keys that the chart leaves to its user, with their docstrings."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            field.name: _JSON_TYPES[field.type] | {"description": field.meaning}
            for field in connector_fields()
            if field.name not in CHART_CONNECTOR_KEYS
        },
    }


@dataclass(frozen=True, slots=True)
class ConnectorField:
    """One key as its source says it."""

    name: str
    type: str
    default: str | int | bool | None
    """None: the key is required."""
    meaning: str


def connector_fields() -> Iterator[ConnectorField]:
    """Yield every key of the connector's settings, in their order.

    The connector's package imports torch and vLLM, which no chart needs. So its file runs alone.
    """
    made = run_path(str(_CONNECTOR_SOURCE))["ConnectorSettings"]
    classes: Any = ast.parse(_CONNECTOR_SOURCE.read_text()).body
    (body,) = (node.body for node in classes if getattr(node, "name", "") == made.__name__)
    texts = {field.target.id: text for field, text in pairwise(body) if hasattr(field, "annotation")}
    for field in fields(made):
        default = None if field.default is MISSING else field.default
        meaning = " ".join(texts[field.name].value.value.split())
        yield ConnectorField(field.name, str(field.type), default, meaning)
