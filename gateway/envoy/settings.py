"""Settings of an Envoy in front of the pods: `ENVOY_…` variables of the process that writes its files and drains it."""

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


def _address(text: str) -> str:
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[2]) <= 65535:
        raise ValueError(f"{text!r} must be host:port")
    return text


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


Address = Annotated[str, AfterValidator(_address)]
"""`host:port`. The host is a name, an IPv4 address, or an IPv6 address in brackets."""


def _absolute(path: str) -> str:
    if path and not path.startswith("/"):
        raise ValueError(f"{path!r} must be an absolute path")
    return path


EnvoyPath = Annotated[str, AfterValidator(_absolute)]
"""Absolute path in Envoy's file system, or empty."""


class GatewayAddress(BaseModel):
    """One gateway process, or a DNS name of several."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        """Accept the text `http,ext_proc` too."""
        if not isinstance(value, str):
            return value
        http, _, ext_proc = value.partition(",")
        return {"http": http, "ext_proc": ext_proc}

    http: Address
    """Address of the gateway's HTTP front, which answers control calls."""
    ext_proc: Address
    """Address of the gateway's external processor (gRPC)."""


class EnvoySettings(ProcessSettings):
    """Settings of one Envoy."""

    model_config = SettingsConfigDict(env_prefix="ENVOY_")

    gateways: tuple[GatewayAddress, ...] = Field(min_length=1)
    """JSON list of the gateways, "host:http port,host:ext_proc port"."""
    pods: tuple[Address, ...] = Field(min_length=1)
    """JSON list of the pods' turn processes, host:port. A pod without one is listed with its vLLM. Envoy finds the
    address that the gateway chose by IP and port. A pod that the gateway knows by name therefore gets only requests
    without a chosen pod."""
    engines: tuple[Address, ...] = ()
    """JSON list of the vLLM servers behind the turn processes, host:port. Envoy sends a request there only if the
    gateway chose that address. Empty: all requests go to the turn processes."""
    listen_host: str = "127.0.0.1"
    """Address to listen on."""
    listen_port: int = Field(8000, ge=0, le=65535)
    """Port to listen on. 0 takes a free port."""
    admin_host: str = "127.0.0.1"
    """Address of Envoy's admin interface. Loopback only, because the interface can stop Envoy."""
    admin_port: int = Field(9901, ge=0, le=65535)
    """Port of Envoy's admin interface. 0 takes a free port."""
    engine_paths: tuple[EngineCall, ...] = ()
    """Calls besides inference that reach the engine, such as "GET /version". Must equal GATEWAY_ENGINE_PATHS."""
    cors_origins: tuple[CorsOrigin, ...] = ()
    """Origins whose pages may call from a browser. Must equal GATEWAY_CORS_ORIGINS. Empty: none."""
    fail_open_stateless: bool = True
    """Serve requests without a context while every gateway is down. Without api_keys_file Envoy then serves them
    without a key."""
    max_body_bytes: int = Field(32 << 20, gt=0, le=1 << 30)
    """Largest request body in bytes. Must equal GATEWAY_MAX_BODY_BYTES. A larger body gets a 413."""
    max_heap_bytes: int = Field(2 << 30, ge=1 << 28)
    """Memory of Envoy in bytes. Near this limit Envoy answers new requests with 503."""
    max_connections: int = Field(20_000, gt=0)
    """Client connections at one time. Envoy closes further ones."""
    max_requests: int = Field(10_000, gt=0)
    """Requests at one time to each cluster. Further requests get a 503."""
    trusted_hops: int = Field(0, ge=0)
    """Number of trusted proxies in front of Envoy that set X-Forwarded-For."""
    plugin_timeout_s: float = Field(5.0, gt=0)
    """Seconds that the gateway has to answer one message. Must exceed 2 s, the deadline of a call of the context
    manager."""
    connect_timeout_s: float = Field(1.0, gt=0)
    """Seconds to connect to a gateway or a pod."""
    upload_timeout_s: float = Field(300.0, gt=0)
    """Seconds that a client has to send a whole request."""
    idle_timeout_s: float = Field(600.0, gt=0)
    """Seconds without a byte of an answer. Must cover a long prompt, and a whole answer without a stream."""
    total_timeout_s: float = Field(3600.0, gt=0)
    """Maximum duration of an answer in seconds."""
    drain_delay_s: int = Field(1, ge=0)
    """Seconds from SIGTERM until the port closes. Meanwhile admin /ready answers 503, and each answer closes its
    connection."""
    drain_timeout_s: float = Field(600.0, ge=0)
    """Seconds that running requests have to finish after the port closed."""
    tls_cert_file: EnvoyPath = ""
    """PEM certificate chain that Envoy shows to gateways and pods. Empty, with the next two settings: no TLS to
    them."""
    tls_key_file: EnvoyPath = ""
    """PEM private key of that certificate, in the same folder."""
    tls_ca_file: EnvoyPath = ""
    """PEM certificates of the CAs that sign the certificates of gateways and pods."""
    tls_server_name: str = Field("context-cache", min_length=1)
    """Name in every part's certificate, whatever the part's address."""
    listen_cert_file: EnvoyPath = ""
    """PEM certificate chain shown to clients. With its key it enables HTTPS. Empty: plain HTTP."""
    listen_key_file: EnvoyPath = ""
    """PEM private key of that certificate, in the same folder."""
    config_dir: EnvoyPath = Field("/etc/context-cache/envoy", min_length=1)
    """Folder for Envoy's files: envoy.json, the SDS files that name its certificates, and the keys."""
    api_keys_file: EnvoyPath = ""
    """JSON file of key hashes and tenants, the same as GATEWAY_API_KEYS_FILE. Envoy checks API keys with it and
    follows its changes. Empty: Envoy checks no keys."""
    metrics_listen: Annotated[str, AfterValidator(lambda text: text and _address(text))] = ""
    """host:port where Envoy answers /stats/prometheus, /ready and /healthz without TLS. Empty: none."""
    traces_endpoint: str = ""
    """OTLP/gRPC address of a trace collector, http://host:4317 or https://…. Empty: no traces."""
    traces_sample_ratio: float = Field(0.1, ge=0, le=1)
    """Share of the traces that start here and are kept, 0 to 1. The caller decides for traces that it starts."""
    traces_ca_file: EnvoyPath = "/etc/ssl/certs/ca-certificates.crt"
    """PEM certificates of the CAs that sign the certificate of a https:// collector."""
    access_log: str = "/dev/stdout"
    """File of the access log in JSON lines. Empty: none."""
    log_level: str = "INFO"
    """Log level of the process that writes the bootstrap and drains Envoy. It does not change Envoy's own log."""

    @property
    def listen_address(self) -> str:
        """`host:port` of the listener for clients."""
        return _joined(self.listen_host, self.listen_port)

    @property
    def admin_address(self) -> str:
        """`host:port` of the admin interface."""
        return _joined(self.admin_host, self.admin_port)

    @property
    def api_keys_filter_file(self) -> str:
        """File of the key check, in its own folder: Envoy reads it again when a file is moved into that folder."""
        return posixpath.join(self.config_dir, "keys", "filter.json")

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        if not is_loopback(self.admin_host):
            raise ValueError(
                f"the admin interface can stop Envoy: admin_host must be a loopback address, not {self.admin_host}"
            )
        if self.metrics_listen and not self.admin_port:
            raise ValueError("metrics_listen shows pages of the admin interface: admin_port must not be 0")
        self._check_certificates()
        return self

    @field_validator("traces_endpoint")
    @classmethod
    def _url_or_nothing(cls, text: str) -> str:
        url = urlsplit(text)
        right = url.scheme in ("http", "https") and url.hostname and url.port != 0
        if text and (not right or url.path.strip("/") or url.query):
            raise ValueError(f"{text!r} must be http://host:port or https://host:port")
        return text

    def _check_certificates(self) -> None:
        if len({not path for path in (self.tls_cert_file, self.tls_key_file, self.tls_ca_file)}) > 1:
            raise ValueError("tls_cert_file, tls_key_file and tls_ca_file belong together: set all three or none")
        if bool(self.listen_cert_file) != bool(self.listen_key_file):
            raise ValueError("listen_cert_file and listen_key_file belong together: set both or none")
        for cert_file, key_file in (
            (self.tls_cert_file, self.tls_key_file),
            (self.listen_cert_file, self.listen_key_file),
        ):
            if posixpath.dirname(cert_file) != posixpath.dirname(key_file):
                raise ValueError(
                    f"{cert_file} and {key_file} must be in the same folder: Envoy watches one folder for new files"
                )
