"""How one knows that a part is ready: it does its work once, rather than merely having a port open.

Every probe is bounded by a short timeout and answers False on any failure to reach the part.
"""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contextcache.rpc import CHANNEL_OPTIONS
from deploy.local.ports import LOOPBACK

_PROBE_S = 2.0
_FIRST_TOKEN_S = 120.0
"""The first forward pass of a process is slower than any later one."""
# Loopback never goes through a proxy, whatever the environment says.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


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
        return _status(urllib.request.Request(self.url), _PROBE_S) == http.client.OK


@dataclass(frozen=True, slots=True)
class EngineReady:
    """vLLM is healthy and has made one token, so that the first request of a user is not the slow one."""

    url: str
    model: str

    def __call__(self) -> bool:
        """Ask once; the token is asked for only of a healthy engine."""
        if not HttpReady(f"{self.url}/health")():
            return False
        body = json.dumps({"model": self.model, "prompt": "Ready", "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        return _status(request, _FIRST_TOKEN_S) == http.client.OK


@dataclass(frozen=True, slots=True)
class EnvoyReady:
    """Envoy has its configuration, and a request gets through it to the gateway."""

    url: str
    admin_url: str

    def __call__(self) -> bool:
        """Ask once."""
        return HttpReady(f"{self.admin_url}/ready")() and HttpReady(f"{self.url}/readyz")()


def gateway_endpoints(url: str) -> dict[str, dict[str, Any]]:
    """Return what a gateway knows of its pods, by name; nothing when it does not answer."""
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
    try:
        with _OPENER.open(url, timeout=_PROBE_S) as answer:
            parsed = json.load(answer)
    except urllib.error.HTTPError as exc:
        with exc:
            parsed = _parsed(exc.read())
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _status(request: urllib.request.Request, timeout_s: float) -> int:
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        exc.close()
        return exc.code
    except (OSError, http.client.HTTPException):
        return 0
