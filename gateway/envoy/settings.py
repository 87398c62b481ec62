"""What an Envoy in front of the pods is told: `ENVOY_…` variables of whoever writes its bootstrap and drains it."""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from contextcache.process.settings import ProcessSettings
from gateway.settings import CorsOrigin, EngineCall, is_loopback

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")

TRACES_PORT = 4317
"""OTLP over gRPC where nobody says otherwise."""


def _address(text: str) -> str:
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[2]) <= 65535:
        raise ValueError(f"{text!r} is not host:port")
    return text


def split_address(address: str) -> tuple[str, int]:
    """Return host, without the brackets of an IPv6 address, and port of `host:port`. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


Address = Annotated[str, AfterValidator(_address)]
"""`host:port`; the host is a name, an IPv4 address, or an IPv6 address in brackets."""


def _absolute(path: str) -> str:
    if path and not path.startswith("/"):
        raise ValueError(f"{path!r} is not an absolute path")
    return path


EnvoyPath = Annotated[str, AfterValidator(_absolute)]
"""An absolute path in the file system that Envoy sees, or nothing; not looked at here."""


def duration(seconds: float) -> str:
    """Return a duration as Envoy reads it, to the millisecond."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


class GatewayAddress(BaseModel):
    """One gateway process, or a name that stands for several."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        """Take `http,ext_proc` too."""
        if not isinstance(value, str):
            return value
        http, _, ext_proc = value.partition(",")
        return {"http": http, "ext_proc": ext_proc}

    http: Address = Field(description="its HTTP front, which answers control calls")
    ext_proc: Address = Field(description="its external processor (gRPC)")


class EnvoySettings(ProcessSettings):
    """Everything an Envoy in front of the pods can be told."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", env_prefix="ENVOY_")

    gateways: tuple[GatewayAddress, ...] = Field(
        min_length=1, description='JSON list of the plugin\'s replicas, "host:http port,host:ext_proc port"'
    )
    pods: tuple[Address, ...] = Field(
        min_length=1,
        description="JSON list of vLLM pods, host:port; the plugin's choice is found here by IP and port, so a pod "
        "given by name gets only requests that nobody chose a pod for",
    )
    listen_host: str = Field("127.0.0.1", description="address to listen on")
    listen_port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    admin_host: str = Field("127.0.0.1", description="address of Envoy's admin interface, which can stop it: loopback")
    admin_port: int = Field(9901, ge=0, le=65535, description="its port; 0 takes a free one")
    engine_paths: tuple[EngineCall, ...] = Field(
        (), description='calls beside inference that reach the engine, "GET /version", as GATEWAY_ENGINE_PATHS'
    )
    cors_origins: tuple[CorsOrigin, ...] = Field(
        (), description="origins whose pages may call from a browser, as GATEWAY_CORS_ORIGINS; empty: none"
    )
    fail_open_stateless: bool = Field(
        True,
        description="serve requests that claim no context while every gateway is down; without api_keys_file nobody "
        "checks keys then",
    )
    max_body_bytes: int = Field(
        32 << 20,
        gt=0,
        le=1 << 30,
        description="bytes of the largest request body, as GATEWAY_MAX_BODY_BYTES; more is 413",
    )
    max_heap_bytes: int = Field(
        2 << 30, ge=1 << 28, description="bytes of Envoy's own memory near which it takes no more requests (503)"
    )
    max_connections: int = Field(20_000, gt=0, description="client connections at one time; more are closed")
    max_requests: int = Field(10_000, gt=0, description="requests at one time to each cluster; more are 503")
    trusted_hops: int = Field(0, ge=0, description="proxies in front whose X-Forwarded-For is believed")
    plugin_timeout_s: float = Field(
        5.0, gt=0, description="seconds the plugin has for one message; a slow context manager (2 s) must fit in"
    )
    connect_timeout_s: float = Field(1.0, gt=0, description="seconds to connect to a gateway or a pod")
    upload_timeout_s: float = Field(300.0, gt=0, description="seconds a client has to send a whole request")
    idle_timeout_s: float = Field(600.0, gt=0, description="seconds without a byte of an answer; covers a long prompt")
    total_timeout_s: float = Field(3600.0, gt=0, description="seconds an answer may take in all")
    drain_delay_s: int = Field(
        1,
        ge=0,
        description="seconds from SIGTERM (admin /ready is 503, answers close their connection) to closing the port",
    )
    drain_timeout_s: float = Field(600.0, ge=0, description="seconds running requests get to finish after that")
    tls_cert_file: EnvoyPath = Field(
        "",
        description="PEM certificate chain that Envoy shows to gateways and pods; empty, with the two below: no TLS "
        "towards them",
    )
    tls_key_file: EnvoyPath = Field("", description="its PEM private key, in the same folder")
    tls_ca_file: EnvoyPath = Field("", description="PEM certificates of who may sign theirs")
    tls_server_name: str = Field(
        "context-cache", min_length=1, description="name that every part's certificate carries, whatever its address"
    )
    listen_cert_file: EnvoyPath = Field(
        "", description="PEM certificate chain shown to clients, with its key HTTPS; empty: plain HTTP"
    )
    listen_key_file: EnvoyPath = Field("", description="its PEM private key, in the same folder")
    config_dir: EnvoyPath = Field(
        "/etc/context-cache/envoy",
        min_length=1,
        description="folder of what is written for Envoy: envoy.json, the SDS files that name its certificates, keys",
    )
    api_keys_file: EnvoyPath = Field(
        "",
        description="JSON file of key hashes and tenants, as GATEWAY_API_KEYS_FILE; Envoy then checks keys itself; "
        "followed when it changes; empty: it does not look at keys",
    )
    metrics_listen: str = Field(
        "",
        description="host:port where Envoy answers /stats/prometheus, /ready and /healthz, no TLS; empty: none",
    )
    traces_endpoint: str = Field(
        "", description="OTLP/gRPC address of a trace collector, http://host:4317 or https://…; empty: no traces"
    )
    traces_sample_ratio: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of traces begun here that are kept; one begun by the caller is kept as it says",
    )
    traces_ca_file: EnvoyPath = Field(
        "/etc/ssl/certs/ca-certificates.crt", description="PEM certificates of who may sign a https:// collector's"
    )
    access_log: str = Field("/dev/stdout", description="file of the access log, JSON lines; empty: none")
    log_level: str = Field("INFO", description="of what writes the bootstrap and drains; not Envoy's own")

    @property
    def admin_address(self) -> str:
        """`host:port` of the admin interface."""
        host = f"[{self.admin_host}]" if ":" in self.admin_host else self.admin_host
        return f"{host}:{self.admin_port}"

    @property
    def api_keys_filter_file(self) -> str:
        """What Envoy checks keys with, in a folder of its own: Envoy looks again when a file is moved there."""
        return posixpath.join(self.config_dir, "keys", "filter.json")

    @model_validator(mode="after")
    def _admin_is_local(self) -> Self:
        if not is_loopback(self.admin_host):
            raise ValueError(f"whoever reaches the admin interface rules Envoy: loopback only, not {self.admin_host}")
        return self

    @model_validator(mode="after")
    def _probes_find_the_admin_interface(self) -> Self:
        if self.metrics_listen and not self.admin_port:
            raise ValueError("metrics_listen shows the admin interface's: admin_port must be known")
        return self

    @field_validator("metrics_listen")
    @classmethod
    def _address_or_nothing(cls, text: str) -> str:
        return _address(text) if text else text

    @field_validator("traces_endpoint")
    @classmethod
    def _url_or_nothing(cls, text: str) -> str:
        url = urlsplit(text)
        right = url.scheme in ("http", "https") and url.hostname and url.port != 0
        if text and (not right or url.path.strip("/") or url.query):
            raise ValueError(f"{text!r} is not http://host:port or https://host:port")
        return text

    @model_validator(mode="after")
    def _certificates_are_whole(self) -> Self:
        if len({not path for path in (self.tls_cert_file, self.tls_key_file, self.tls_ca_file)}) > 1:
            raise ValueError("tls_cert_file, tls_key_file and tls_ca_file belong together: set all three or none")
        if bool(self.listen_cert_file) != bool(self.listen_key_file):
            raise ValueError("listen_cert_file and listen_key_file belong together: set both or none")
        for cert_file, key_file in (
            (self.tls_cert_file, self.tls_key_file),
            (self.listen_cert_file, self.listen_key_file),
        ):
            if posixpath.dirname(cert_file) != posixpath.dirname(key_file):
                raise ValueError(f"{cert_file} and {key_file} lie in two folders; Envoy watches one for new files")
        return self
