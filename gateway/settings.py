"""How a gateway is configured: `GATEWAY_…` variables."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from contextcache.process.settings import TlsSettings, TracingSettings

EngineCall = Annotated[str, Field(pattern=r"^[A-Z]+ (/[A-Za-z0-9_~!$&'()*+,;=:@.-]+)+$")]
"""A method and a path, plainly spelled: `GET /version`."""
CorsOrigin = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^\s/?#*A-Z]+$")]
"""An origin as browsers write it: `https://chat.example.com`, with its port where that is not the scheme's own."""


class EndpointSettings(BaseModel):
    """One pod in `GATEWAY_ENDPOINTS`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")
    url: str = Field(pattern=r"^https?://[^/]+(/.*)?$")
    sidecar: str = ""
    draining: bool = False
    turn_url: str = Field("", pattern=r"^(https?://[^/]+(/.*)?)?$")

    @field_validator("url", "turn_url")
    @classmethod
    def _without_slash(cls, url: str) -> str:
        return url.rstrip("/")


class GatewaySettings(TlsSettings, TracingSettings):
    """Everything a gateway can be told."""

    model_config = SettingsConfigDict(env_prefix="GATEWAY_")

    host: str = "127.0.0.1"
    """Address to listen on. Any address but loopback needs an API-key file."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on. 0 takes a free port."""
    manager: str = "127.0.0.1:50051"
    """gRPC address of the context manager."""
    endpoints: tuple[EndpointSettings, ...] = ()
    """JSON list of the pods: {"name", "url", "sidecar": gRPC address or "", "draining": false, "turn_url": URL of the
    pod's turn process}. Without a turn_url, all requests go to url."""
    endpoints_file: Path | None = None
    """JSON file with such a list, instead of GATEWAY_ENDPOINTS. The gateway reads it again when it changes."""
    kubernetes_service_selector: str = ""
    """Labels of the Services whose EndpointSlices list the pods, key=value[,…]. Replaces a list of endpoints.
    Empty: no discovery."""
    kubernetes_namespace: str = ""
    """Namespace of those Services. Empty: the gateway's own namespace."""
    kubernetes_port_name: str = "http"
    """Name of the Service port for vLLM's HTTP API."""
    kubernetes_sidecar_port_name: str = "kv-grpc"
    """Name of the Service port for the kv-sidecar's gRPC. A pod without this port has no sidecar."""
    kubernetes_turn_port_name: str = "turn"
    """Name of the Service port for the pod's turn process. A pod without this port gets all requests at the port of
    vLLM's HTTP API."""
    kubernetes_scheme: Literal["http", "https"] = "http"
    """Scheme of vLLM's HTTP API and of the turn process."""
    tls_clients: Literal["required", "none"] = "required"
    """Client certificates with TLS on. `required`: callers of the HTTP front need a certificate of the CA, as Envoy
    has. `none`: they need none. The external processor always requires one."""
    metrics_host: str = "127.0.0.1"
    """Address of GATEWAY_METRICS_PORT."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of /metrics, /healthz, /readyz and /serving without TLS, for probes. 0: none."""
    ext_proc_listen: str = Field("", pattern=r"^(.+:[0-9]{1,5})?$")
    """host:port of Envoy's external processor. Without keys only loopback is allowed, as for GATEWAY_HOST. Empty:
    none. Port 0 takes a free port."""
    ext_proc_timeout_s: float = Field(30.0, gt=0)
    """Seconds from a request's head to the answer to Envoy, without the time of body chunks."""
    tenant_rate_per_s: float = Field(0.0, ge=0)
    """Requests per second of one tenant through this process. Further requests get a 429. 0: no limit."""
    tenant_burst: int = Field(20, ge=1)
    """Requests that an idle tenant may send at once."""
    tenant_in_flight_max: int = Field(0, ge=0)
    """Requests of one tenant in flight through this process, control calls included. Further requests get 429
    too_many_in_flight. 0: no limit. Behind Envoy the gateway counts the requests that pods report each second. A
    pod limits its own with TURN_TENANT_TURNS_MAX."""
    tenant_buffered_bytes_max: int = Field(256 << 20, ge=0)
    """Bytes of one tenant's request bodies in memory at one time, here or in Envoy. Further bodies get a 429. 0:
    only a fair share of max_buffered_bytes limits them."""
    plain_max: Literal["off", "route", "keep"] = "keep"
    """Most that the gateway does for requests without a context, whatever a key's "plain" says. `off`: nothing.
    `route`: send a conversation to one pod. `keep`: also keep its KV and find it again by its tokens."""
    label_headers: tuple[str, ...] = ()
    """JSON list of lower-case headers that name a conversation. They come before the headers of known clients. They
    choose only the pod and the group."""
    salt_stateless: bool = False
    """Give completions, chats, messages and responses without a context their tenant's cache_salt. No tenant can
    then tell by timing which prompts another tenant sent. Equal prompts of two tenants are computed twice."""
    saturated_waiting: int = Field(32, ge=1)
    """Requests in a pod's queue from which turns go to another pod than their holder."""
    saturated_kv_usage: float = Field(0.98, gt=0, le=1)
    """Share of a pod's KV blocks in use from which its turns go to another pod, if requests wait there."""
    shed_waiting: int = Field(256, ge=0)
    """Requests in every pod's queue from which new requests get a 429. 0: never."""
    pull_timeout_s: float = Field(0.2, gt=0)
    """Seconds to tell a sidecar to pull KV from the holder. After that the turn runs without the pull."""
    secret_file: Path
    """File with the deployment's signing secret, at least 32 bytes."""
    api_keys_file: Path | None = None
    """JSON file {"keys": [{"sha256", "tenant"}]}. Empty: no keys and one tenant, "default"."""
    engine_paths: tuple[EngineCall, ...] = ()
    """JSON list of calls besides inference that reach the engine, such as "GET /version"."""
    cors_origins: tuple[CorsOrigin, ...] = ()
    """JSON list of origins, such as https://chat.example.com, whose pages may call from a browser. Wildcards are
    not allowed. Empty: none."""
    console: bool = True
    """Serve the console at /console. false: /console is a 404."""
    max_body_bytes: int = Field(32 << 20, gt=0)
    """Largest request body in bytes. A larger body gets a 413."""
    max_buffered_bytes: int = Field(1 << 30, gt=0)
    """Bytes of all request bodies in memory at one time. One tenant may hold as much as it leaves free. Beyond that
    it gets a 429. If no room is left, a tenant that holds nothing gets a 503."""
    max_in_flight: int = Field(2048, gt=0)
    """Requests of all tenants in flight at one time, control calls included. At the limit, a tenant with its fair
    share gets 429 too_many_in_flight. At twice the limit every other tenant gets a 503."""
    body_timeout_s: float = Field(60.0, gt=0)
    """Seconds without a byte of a request body before a 408. The whole body has the same time, plus one second for
    each 32 KiB received."""
    connect_timeout_s: float = Field(2.0, gt=0)
    """Seconds to connect to a pod before the gateway tries another pod."""
    idle_timeout_s: float = Field(600.0, gt=0)
    """Seconds without a byte from a pod. Must cover a long prompt, and a whole answer without a stream."""
    total_timeout_s: float = Field(3600.0, gt=0)
    """Maximum duration of a request in seconds."""
    manager_timeout_s: float = Field(2.0, gt=0)
    """Deadline of one call of the context manager, in seconds."""
    sidecar_timeout_s: float = Field(0.5, gt=0)
    """Seconds that a GET waits for the holder's sidecar."""
    delete_timeout_s: float = Field(5.0, gt=0)
    """Seconds that a DELETE waits for the sidecars."""
    probe_interval_s: float = Field(1.0, gt=0)
    """Seconds between two probes of the pods."""
    probe_timeout_s: float = Field(1.0, gt=0)
    """Seconds that a pod has to answer a probe."""
    drain_delay_s: float = Field(0.0, ge=0)
    """Seconds from SIGTERM until the port closes. Meanwhile /readyz answers 503."""
    drain_timeout_s: float = Field(30.0, gt=0)
    """Seconds that running requests have to finish after the port closed."""
    log_level: str = "INFO"
    """Log level. DEBUG adds one line per request."""

    @model_validator(mode="after")
    def _keys_unless_loopback(self) -> Self:
        if self.api_keys_file is None and not is_loopback(self.host):
            raise ValueError(
                "without GATEWAY_API_KEYS_FILE the gateway listens on loopback only: GATEWAY_HOST must not be "
                f"{self.host}"
            )
        sources = (bool(self.endpoints), self.endpoints_file is not None, bool(self.kubernetes_service_selector))
        if sum(sources) != 1:
            raise ValueError(
                "set exactly one of GATEWAY_ENDPOINTS, GATEWAY_ENDPOINTS_FILE and GATEWAY_KUBERNETES_SERVICE_SELECTOR"
            )
        listen = self.ext_proc_listen
        if listen and self.api_keys_file is None and not is_loopback(split_address(listen)[0]):
            raise ValueError(
                "without GATEWAY_API_KEYS_FILE the external processor listens on loopback only: change "
                "GATEWAY_EXT_PROC_LISTEN"
            )
        if 0 < self.tenant_buffered_bytes_max < self.max_body_bytes:
            # A body between the two would be asked to come again for ever.
            raise ValueError("GATEWAY_TENANT_BUFFERED_BYTES_MAX must be 0 or at least GATEWAY_MAX_BODY_BYTES")
        names = [endpoint.name for endpoint in self.endpoints]
        if len(set(names)) != len(names):
            raise ValueError("two endpoints have the same name")
        return self


def split_address(address: str) -> tuple[str, int]:
    """Return the host of `host:port`, without the brackets of an IPv6 address, and the port. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
