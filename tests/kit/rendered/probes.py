"""Probes as the kubelet makes them: from outside, at the pod's address, with the port by name or number."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from typing import Any

import httpx

Probe = Mapping[str, Any]


def passes(probe: Probe, *, address: str, ports: Mapping[str, int], env: Mapping[str, str]) -> bool:
    """Return whether a probe succeeds once. Each kind that the chart uses is here; another one is a KeyError."""
    (kind,) = probe.keys() & {"httpGet", "tcpSocket", "exec", "grpc"}
    timeout_s = probe.get("timeoutSeconds", 1)
    if kind == "exec":
        return _runs(probe["exec"]["command"], env, timeout_s)
    asked = {"httpGet": _answers, "tcpSocket": _listens}[kind]
    port = probe[kind]["port"]
    return asked(probe[kind], address, port if isinstance(port, int) else ports[port], timeout_s)


def _answers(get: Mapping[str, Any], address: str, port: int, timeout_s: float) -> bool:
    scheme = get.get("scheme", "HTTP").lower()
    try:
        # The kubelet checks no certificate and shows none.
        answer = httpx.get(f"{scheme}://{address}:{port}{get['path']}", verify=False, timeout=timeout_s)
    except httpx.TransportError:
        return False
    return 200 <= answer.status_code < 400


def _listens(_socket: Mapping[str, Any], address: str, port: int, timeout_s: float) -> bool:
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def _runs(command: list[str], env: Mapping[str, str], timeout_s: float) -> bool:
    try:
        return subprocess.run(command, env=env, capture_output=True, timeout=timeout_s, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
