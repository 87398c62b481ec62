"""Settings of the injector: `INJECTOR_…` variables, read in `__main__` only."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from contextcache.process.settings import ProcessSettings


class InjectorSettings(ProcessSettings):
    """One injector. Its certificate is for the API server, unlike that of mutual TLS."""

    model_config = SettingsConfigDict(env_prefix="INJECTOR_")

    host: str = "127.0.0.1"
    """Address of the webhook."""
    port: int = Field(8443, ge=0, le=65535)
    """Port of the webhook. 0 takes a free port."""
    cert_file: Path
    """PEM certificate chain shown to the API server."""
    key_file: Path
    """PEM private key of that certificate. Both files are read again when they change."""
    parts_file: Path
    """JSON file with the additions to pods, written by the chart."""
    metrics_host: str = "127.0.0.1"
    """Address of INJECTOR_METRICS_PORT."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of /metrics, /healthz and /readyz without TLS. 0: none."""
    max_body_bytes: int = Field(4 << 20, gt=0)
    """Maximum bytes of a review. The API server sends up to 3 MiB."""
    max_requests: int = Field(32, ge=1)
    """Maximum reviews in progress. Further ones get a 503, and their pods start without an injection."""
    max_connections: int = Field(64, ge=1)
    """Maximum connections, TLS handshakes included. Beyond it the oldest idle one is closed."""
    request_timeout_s: float = Field(5.0, gt=0)
    """Seconds from a review's head to its answer. Equal to the API server's deadline."""
    drain_delay_s: float = Field(5.0, ge=0)
    """Seconds from SIGTERM until the port closes. Meanwhile /readyz answers 503."""
    drain_timeout_s: float = Field(5.0, gt=0)
    """Seconds that running reviews have to finish after the port closed."""
    log_level: str = "INFO"
    """Log level. DEBUG adds one line per review."""
