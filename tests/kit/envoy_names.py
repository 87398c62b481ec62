"""Names in Envoy's bootstrap, and the parts of it that tests look at."""

from __future__ import annotations

from typing import Any

from gateway.envoy.render import BOOTSTRAP, rendered
from gateway.envoy.settings import EnvoySettings

LISTENER = "http"
PODS = "pods"
PLUGIN = "plugin"
GATEWAY_HTTP = "gateway_http"
GATEWAY_STREAMS = "gateway_streams"
API_KEYS = "api-keys"
EXT_PROC = "envoy.filters.http.ext_proc"
PROCESSOR_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LB_NAMESPACE = "envoy.lb"
DESTINATION_KEY = "x-gateway-destination-endpoint"
TYPE = "type.googleapis.com/envoy."


def bootstrap(settings: EnvoySettings) -> dict[str, Any]:
    """Return the bootstrap of an Envoy with these settings."""
    found: dict[str, Any] = rendered(settings)[BOOTSTRAP]
    return found


def secrets(settings: EnvoySettings) -> dict[str, Any]:
    """Return the SDS files by name."""
    return {name: content for name, content in rendered(settings).items() if name != BOOTSTRAP}


def connection_manager(found: dict[str, Any]) -> dict[str, Any]:
    """Return the connection manager of the clients' listener of a bootstrap."""
    [manager] = found["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    config: dict[str, Any] = manager["typed_config"]
    return config


def routes(settings: EnvoySettings) -> list[dict[str, Any]]:
    """Return the routes in the order in which Envoy tries them."""
    found: list[dict[str, Any]] = connection_manager(bootstrap(settings))["route_config"]["virtual_hosts"][0]["routes"]
    return found
