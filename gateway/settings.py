"""How a gateway is configured: `GATEWAY_…` variables."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from contextcache.process.settings import TlsSettings, TracingSettings
from gateway.ports import Endpoint

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

    @field_validator("url")
    @classmethod
    def _without_slash(cls, url: str) -> str:
        return url.rstrip("/")


def endpoint_of(settings: EndpointSettings) -> Endpoint:
    """Return the pod that the settings name."""
    return Endpoint(settings.name, settings.url, settings.sidecar, draining=settings.draining)


class GatewaySettings(TlsSettings, TracingSettings):
    """Everything a gateway can be told."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", env_prefix="GATEWAY_")

    host: str = Field("127.0.0.1", description="address to listen on; anything but loopback needs an API-key file")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    manager: str = Field("127.0.0.1:50051", description="gRPC address of the context manager")
    endpoints: tuple[EndpointSettings, ...] = Field(
        (), description='JSON list of the pods: {"name", "url", "sidecar": gRPC address or "", "draining": false}'
    )
    endpoints_file: Path | None = Field(
        None, description="JSON file with such a list instead, read again when it changes: pods come, drain and go"
    )
    kubernetes_service_selector: str = Field(
        "",
        description="labels of the Services whose EndpointSlices list the pods, key=value[,…]; instead of a list of "
        "endpoints; empty: no discovery",
    )
    kubernetes_namespace: str = Field("", description="namespace of those Services; empty: this pod's own")
    kubernetes_port_name: str = Field("http", description="name of the Service port that is vLLM's HTTP API")
    kubernetes_sidecar_port_name: str = Field(
        "kv-grpc", description="name of the Service port that is the kv-sidecar's gRPC; pods without it have no sidecar"
    )
    kubernetes_scheme: Literal["http", "https"] = Field("http", description="how vLLM's HTTP API is spoken to")
    kubernetes_resync_s: float = Field(
        300.0, gt=0, description="seconds between two full lists, in case a watch has lost something without a word"
    )
    tls_clients: Literal["required", "none"] = Field(
        "required",
        description="with TLS on, required: callers of the HTTP front need a certificate of the CA (Envoy has one); "
        "none: they do not. The external processor always asks for one.",
    )
    metrics_host: str = Field("127.0.0.1", description="address of GATEWAY_METRICS_PORT")
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port of /metrics, /healthz, /readyz and /serving without TLS, for probes; 0: none",
    )
    ext_proc_listen: str = Field(
        "",
        pattern=r"^(.+:[0-9]{1,5})?$",
        description="host:port of Envoy's external processor, as GATEWAY_HOST restricted without keys; empty: none, "
        "port 0 takes a free one",
    )
    ext_proc_picker: Literal["choose", "hint"] = Field(
        "choose",
        description="choose: name the pod; hint: name the holder to another endpoint picker behind this one "
        "(envoy.lb.subset_hint) and leave the choice to it",
    )
    ext_proc_timeout_s: float = Field(
        30.0,
        gt=0,
        description="seconds from a request's head to its answer towards Envoy, pieces of a body excluded",
    )
    tenant_rate_per_s: float = Field(
        0.0, ge=0, description="requests a second of one tenant through this process; more is 429; 0: no limit"
    )
    tenant_burst: int = Field(20, ge=1, description="requests a tenant that was idle may make at once")
    tenant_in_flight_max: int = Field(
        0,
        ge=0,
        description="requests of one tenant, control calls too, that may be in flight through this process; more is "
        "429 too_many_in_flight; 0: no limit. Behind Envoy it counts those that the pods report each second; a "
        "pod counts its own at once (TURN_TENANT_TURNS_MAX)",
    )
    tenant_buffered_bytes_max: int = Field(
        256 << 20,
        ge=0,
        description="bytes of one tenant's request bodies held at one time, here or by Envoy for this process; more is "
        "429; 0: no limit but a fair share of max_buffered_bytes",
    )
    plain_max: Literal["off", "route", "keep"] = Field(
        "keep",
        description='most that is done for requests without a context, whatever a key\'s "plain" says: off, route (a '
        "conversation goes to one pod) or keep (its KV is kept, and found again by its tokens)",
    )
    label_headers: tuple[str, ...] = Field(
        (),
        description="JSON list of headers, lower case, that name a conversation, before those of known clients; only "
        "its pod and its group depend on it",
    )
    salt_stateless: bool = Field(
        False,
        description="give completions without a context their tenant's cache_salt, so that no tenant can tell by time "
        "what another sent; equal prompts of two tenants are then computed twice",
    )
    saturated_waiting: int = Field(
        32, ge=1, description="requests in a pod's queue from which turns go to another pod than their holder"
    )
    saturated_kv_usage: float = Field(
        0.98, gt=0, le=1, description="share of a pod's KV blocks in use from which, with requests waiting, the same"
    )
    shed_waiting: int = Field(
        256, ge=0, description="requests in every pod's queue from which new ones are 429; 0: never"
    )
    pull_timeout_s: float = Field(
        0.2, gt=0, description="seconds to tell a sidecar to fetch KV from the holder before the turn goes on without"
    )
    secret_file: Path = Field(description="file with the deployment's signing secret, 32 bytes or more")
    api_keys_file: Path | None = Field(
        None, description='JSON file {"keys": [{"sha256", "tenant"}]}; empty: one tenant, "default", and no keys'
    )
    engine_paths: tuple[EngineCall, ...] = Field(
        (),
        description='JSON list of calls beside inference that reach the engine, each as "GET /version"',
    )
    cors_origins: tuple[CorsOrigin, ...] = Field(
        (),
        description="JSON list of origins, https://chat.example.com, whose pages may call from a browser; each whole, "
        "there is no wildcard; empty: none",
    )
    console: bool = Field(
        default=True, description="serve the console, a page over this API, at /console; false: that is not found"
    )
    max_body_bytes: int = Field(32 << 20, gt=0, description="bytes of the largest request body; more is 413")
    max_buffered_bytes: int = Field(
        1 << 30,
        gt=0,
        description="bytes of all request bodies held at one time, so memory is bounded; a tenant may hold as much as "
        "it leaves free, more is 429, and 503 to a tenant that holds nothing",
    )
    max_in_flight: int = Field(
        2048,
        gt=0,
        description="requests of all tenants in flight at one time, control calls too; then a tenant with its equal "
        "share of them gets 429 too_many_in_flight, and at twice as many every other tenant gets 503",
    )
    body_timeout_s: float = Field(
        60.0,
        gt=0,
        description="seconds without a byte of a request body before it is 408, and for all of it, with one more "
        "for each 32 KiB that came",
    )
    connect_timeout_s: float = Field(2.0, gt=0, description="seconds to connect to a pod before another one is tried")
    idle_timeout_s: float = Field(600.0, gt=0, description="seconds without a byte from a pod; covers a long answer")
    total_timeout_s: float = Field(3600.0, gt=0, description="seconds a request may take in all")
    manager_timeout_s: float = Field(2.0, gt=0, description="seconds for one call of the context manager")
    sidecar_timeout_s: float = Field(0.5, gt=0, description="seconds a GET waits for the holder's sidecar")
    delete_timeout_s: float = Field(5.0, gt=0, description="seconds a DELETE waits for the sidecars")
    probe_interval_s: float = Field(1.0, gt=0, description="seconds between two looks at the pods")
    probe_timeout_s: float = Field(1.0, gt=0, description="seconds a pod has to answer a probe")
    identity_ttl_s: float = Field(60.0, gt=0, description="seconds a signed identity is good for")
    drain_delay_s: float = Field(
        0.0, ge=0, description="seconds between SIGTERM (/readyz is 503 from then on) and closing the port"
    )
    drain_timeout_s: float = Field(30.0, gt=0, description="seconds running requests get to finish after that")
    log_level: str = Field("INFO", description="DEBUG adds one line per request")

    @field_validator("api_keys_file", "endpoints_file", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return None if value == "" else value

    @model_validator(mode="after")
    def _keys_unless_loopback(self) -> Self:
        if self.api_keys_file is None and not is_loopback(self.host):
            raise ValueError(f"without GATEWAY_API_KEYS_FILE the gateway listens on loopback only, not on {self.host}")
        sources = (bool(self.endpoints), self.endpoints_file is not None, bool(self.kubernetes_service_selector))
        if sum(sources) != 1:
            raise ValueError(
                "set one of GATEWAY_ENDPOINTS, GATEWAY_ENDPOINTS_FILE and GATEWAY_KUBERNETES_SERVICE_SELECTOR"
            )
        if self.ext_proc_listen and self.api_keys_file is None and not is_loopback(host_of(self.ext_proc_listen)):
            raise ValueError("without GATEWAY_API_KEYS_FILE the external processor listens on loopback only")
        if 0 < self.tenant_buffered_bytes_max < self.max_body_bytes:
            # A body between the two would be asked to come again for ever.
            raise ValueError("GATEWAY_TENANT_BUFFERED_BYTES_MAX is 0 or at least GATEWAY_MAX_BODY_BYTES")
        names = [endpoint.name for endpoint in self.endpoints]
        if len(set(names)) != len(names):
            raise ValueError("two endpoints have the same name")
        return self


def host_of(address: str) -> str:
    """Return the host of `host:port`, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
