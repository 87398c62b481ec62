"""How the injector is configured: `INJECTOR_…` variables, read in `__main__` only."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from contextcache.process.settings import ProcessSettings


class InjectorSettings(ProcessSettings):
    """Everything an injector can be told. Its certificate is for the API server, not that of mutual TLS."""

    model_config = SettingsConfigDict(env_prefix="INJECTOR_", frozen=True, extra="ignore")

    host: str = Field("127.0.0.1", description="address of the webhook")
    port: int = Field(8443, ge=0, le=65535, description="port of the webhook; 0 takes a free one")
    cert_file: Path = Field(description="PEM certificate chain shown to the API server")
    key_file: Path = Field(description="its PEM private key; both are read again when they change")
    parts_file: Path = Field(description="JSON file with what is put into pods, written by the chart")
    metrics_host: str = Field("127.0.0.1", description="address of INJECTOR_METRICS_PORT")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="port of /metrics, /healthz and /readyz without TLS; 0: none"
    )
    events: bool = Field(
        default=False, description="write an Event about a pod that is left alone; needs the right to create them"
    )
    max_body_bytes: int = Field(
        4 << 20, gt=0, description="bytes of the largest review; the API server sends up to 3 MiB"
    )
    max_requests: int = Field(
        32, ge=1, description="reviews answered at one time; more are 503, and the pods start without an injection"
    )
    max_connections: int = Field(
        64, ge=1, description="connections held at one time, TLS handshakes included; the oldest idle one gives way"
    )
    request_timeout_s: float = Field(
        5.0, gt=0, description="seconds from a review's head to its answer; the API server's own deadline is as long"
    )
    handshake_timeout_s: float = Field(5.0, gt=0, description="seconds a TLS handshake may take")
    idle_timeout_s: float = Field(75.0, gt=0, description="seconds a connection without a request is kept")
    reload_interval_s: float = Field(10.0, gt=0, description="seconds between two looks at the certificate's files")
    drain_delay_s: float = Field(
        5.0, ge=0, description="seconds between SIGTERM (/readyz is 503 from then on) and closing the port"
    )
    drain_timeout_s: float = Field(5.0, gt=0, description="seconds running reviews get to finish after that")
    log_level: str = Field("INFO", description="DEBUG adds one line per review")
