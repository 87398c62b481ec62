"""The pods, each an engine with its turn process and its sidecar, as the gateway and Envoy are told of them."""

from __future__ import annotations

import json
from typing import Any

from deploy.local.ports import LOOPBACK
from deploy.local.settings import StackSettings

DRAIN_S = 10.0
"""Seconds that running answers get when Envoy is stopped."""
_ROUTING_S = 3.0
"""What a look of the plugin may take beside its call to the context manager; both together are Envoy's 5 s."""


def endpoint_name(number: int) -> str:
    """Return what the gateway calls an engine."""
    return f"engine-{number}"


def endpoints_of(settings: StackSettings) -> list[dict[str, Any]]:
    """Return the pods as `GATEWAY_ENDPOINTS_FILE` holds them."""
    ports = settings.ports
    return [
        {
            "name": endpoint_name(number),
            "url": f"http://{LOOPBACK}:{ports.engine(number)}",
            "turn_url": f"http://{LOOPBACK}:{ports.turn(number)}",
            "sidecar": f"{LOOPBACK}:{ports.sidecar(number)}",
            "draining": False,
        }
        for number in range(settings.engines)
    ]


def envoy_environment(settings: StackSettings) -> dict[str, str]:
    """Return what Envoy's bootstrap is made of, as variables."""
    ports = settings.ports
    return {
        "ENVOY_LISTEN_HOST": LOOPBACK,
        "ENVOY_LISTEN_PORT": str(ports.envoy),
        "ENVOY_ADMIN_PORT": str(ports.envoy_admin),
        "ENVOY_GATEWAYS": json.dumps([f"{LOOPBACK}:{ports.gateway},{LOOPBACK}:{ports.ext_proc}"]),
        "ENVOY_PODS": json.dumps([f"{LOOPBACK}:{ports.turn(number)}" for number in range(settings.engines)]),
        "ENVOY_ENGINES": json.dumps([f"{LOOPBACK}:{ports.engine(number)}" for number in range(settings.engines)]),
        # Nobody in front has to notice that we go.
        "ENVOY_DRAIN_DELAY_S": "0",
        "ENVOY_DRAIN_TIMEOUT_S": str(DRAIN_S),
        "ENVOY_API_KEYS_FILE": str(settings.paths.api_keys),
        "ENVOY_CONFIG_DIR": str(settings.paths.envoy),
        **_both_fronts(settings),
    }


def _both_fronts(settings: StackSettings) -> dict[str, str]:
    """Return what Envoy does as the gateway is told to: how long a pod may be silent, and how long a look may take."""
    told = settings.environment()
    found = {}
    if idle_s := told.get("GATEWAY_IDLE_TIMEOUT_S"):
        found["ENVOY_IDLE_TIMEOUT_S"] = idle_s
    if manager_s := told.get("GATEWAY_MANAGER_TIMEOUT_S"):
        # Somebody waits longer for the context manager than is shipped: that is no dead gateway either.
        found["ENVOY_PLUGIN_TIMEOUT_S"] = str(float(manager_s) + _ROUTING_S)
    return found
