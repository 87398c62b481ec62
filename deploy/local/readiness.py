"""How one knows that a part is ready: it does its work once, rather than merely having a port open.

Every probe is bounded by a short timeout and answers False on any failure to reach the part.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contextcache.wire.rpc import CHANNEL_OPTIONS
from deploy.local.ports import LOOPBACK

_PROBE_S = 2.0
_FIRST_TOKEN_S = 120.0
"""The first forward pass of a process is slower than any later one."""
# Loopback never goes through a proxy, whatever the environment says, and shows no certificate.
_client = partial(httpx.Client, trust_env=False, verify=False)


def redis_answers(port: int) -> bool:
    """Return whether a Redis on this loopback port answers PING (it does not while it loads its file)."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=_PROBE_S) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False


def grpc_serves(target: str) -> bool:
    """Return whether a gRPC server says SERVING."""
    with grpc.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass(frozen=True, slots=True)
class HttpReady:
    """A GET answers 200."""

    url: str

    def __call__(self) -> bool:
        """Ask once."""
        return _is_ok(self.url)


@dataclass(frozen=True, slots=True)
class EngineReady:
    """vLLM is healthy and has made one token, so that the first request of a user is not the slow one."""

    url: str
    model: str

    def __call__(self) -> bool:
        """Ask once; the token is asked for only of a healthy engine."""
        first_token = {"model": self.model, "prompt": "Ready", "max_tokens": 1}
        return _is_ok(f"{self.url}/health") and _is_ok(f"{self.url}/v1/completions", first_token, _FIRST_TOKEN_S)


@dataclass(frozen=True, slots=True)
class EnvoyReady:
    """Envoy has its configuration, and a request gets through it to the gateway."""

    url: str
    admin_url: str

    def __call__(self) -> bool:
        """Ask once."""
        return _is_ok(f"{self.admin_url}/ready") and _is_ok(f"{self.url}/readyz")


def gateway_endpoints(url: str) -> dict[str, dict[str, Any]]:
    """Return what a gateway knows of its pods, by name, as its metrics port says; nothing when it does not answer."""
    described = _json(f"{url}/readyz")
    return dict(described.get("endpoints") or {})


def envoy_hosts(admin_url: str, cluster: str) -> set[str]:
    """Return the addresses of a cluster that Envoy holds for healthy; none when it does not answer."""
    clusters = _json(f"{admin_url}/clusters?format=json").get("cluster_statuses") or []
    hosts = [host for found in clusters if found["name"] == cluster for host in found.get("host_statuses") or []]
    return {_address(host) for host in hosts if not any(_is_fault(fact) for fact in host["health_status"].items())}


def _address(host: dict[str, Any]) -> str:
    socket_address = host["address"]["socket_address"]
    return f"{socket_address['address']}:{socket_address['port_value']}"


def _is_fault(fact: tuple[str, Any]) -> bool:
    name, value = fact
    return value is True if name != "eds_health_status" else value != "HEALTHY"


def _json(url: str) -> dict[str, Any]:
    """Return the object that a GET answers with, whatever its status; empty when there is none."""
    try:
        with _client(timeout=_PROBE_S) as client:
            parsed = client.get(url).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _is_ok(url: str, body: dict[str, Any] | None = None, timeout_s: float = _PROBE_S) -> bool:
    try:
        with _client(timeout=timeout_s) as client:
            return client.request("GET" if body is None else "POST", url, json=body).is_success
    except httpx.HTTPError:
        return False
