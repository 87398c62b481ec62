"""Envoy's bootstrap as deployed, and the same without the plugin, so that the two differ by the plugin alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.envoy.render import BOOTSTRAP, rendered
from gateway.envoy.settings import EnvoySettings, GatewayAddress


def with_plugin(
    *, port: int, admin_port: int, gateway: str, ext_proc: str, pod: str, access_log: Path
) -> dict[str, Any]:
    """Return the bootstrap for one gateway (addresses of its two fronts) and one pod, on loopback."""
    settings = EnvoySettings(
        listen_port=port,
        admin_port=admin_port,
        gateways=(GatewayAddress(http=gateway, ext_proc=ext_proc),),
        pods=(pod,),
        access_log=str(access_log),
    )
    found: dict[str, Any] = rendered(settings)[BOOTSTRAP]
    return found


def without_plugin(**addresses: Any) -> dict[str, Any]:
    """Return the same without the external processor and its cluster: every request goes to the pod as it came."""
    config = with_plugin(**addresses)
    resources = config["static_resources"]
    resources["clusters"] = [cluster for cluster in resources["clusters"] if cluster["name"] != "plugin"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [found for found in manager["http_filters"] if not found["name"].endswith("ext_proc")]
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        route.pop("typed_per_filter_config", None)
    return config
