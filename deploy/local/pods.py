"""The pods, each an engine and its sidecar, as the gateway and Envoy are told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.envoy.settings import EnvoySettings, GatewayAddress
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
            "sidecar": f"{LOOPBACK}:{ports.sidecar(number)}",
            "draining": False,
        }
        for number in range(settings.engines)
    ]


def envoy_settings(settings: StackSettings, endpoints: Sequence[Mapping[str, Any]]) -> EnvoySettings:
    """Return what Envoy's bootstrap is made of."""
    ports = settings.ports
    return EnvoySettings(
        listen_host=LOOPBACK,
        listen_port=ports.envoy,
        admin_port=ports.envoy_admin,
        gateways=(GatewayAddress(http=f"{LOOPBACK}:{ports.gateway}", ext_proc=f"{LOOPBACK}:{ports.ext_proc}"),),
        pods=tuple(str(endpoint["url"]).removeprefix("http://") for endpoint in endpoints),
        # Nobody in front has to notice that we go.
        drain_delay_s=0,
        drain_timeout_s=DRAIN_S,
        api_keys_file=str(settings.paths.api_keys),
        api_keys_filter_file=str(settings.paths.envoy_keys),
        **_both_fronts(settings),
    )


def _both_fronts(settings: StackSettings) -> dict[str, float]:
    """Return what Envoy does as the gateway is told to: how long a pod may be silent, and how long a look may take."""
    told = settings.environment()
    found = {}
    if idle_s := told.get("GATEWAY_IDLE_TIMEOUT_S"):
        found["idle_timeout_s"] = float(idle_s)
    if manager_s := told.get("GATEWAY_MANAGER_TIMEOUT_S"):
        # Somebody waits longer for the context manager than is shipped: that is no dead gateway either.
        found["plugin_timeout_s"] = float(manager_s) + _ROUTING_S
    return found
