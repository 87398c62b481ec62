"""How a context manager is configured. Read once, in `__main__`."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from context_manager.layout import TENANT_BYTES_MAX
from contextcache.model import MAX_TTL_S, MIN_TTL_S
from contextcache.process.settings import TlsSettings, TracingSettings


class ManagerSettings(TlsSettings, TracingSettings):
    """Environment variables `MANAGER_…`."""

    model_config = SettingsConfigDict(env_prefix="MANAGER_")

    listen: str = "127.0.0.1:50051"
    """gRPC address to listen on. Port 0 takes a free port. Loopback by default; the chart sets another address."""
    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    """redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://host:26379/<service>. An ACL user and password
    go in as user:password@. Secret because of the password."""
    redis_timeout_s: float = Field(0.7, gt=0)
    """Seconds without an answer from Redis before a call fails. Short, so that clients get an error within a second."""
    redis_wait_replicas: int = Field(0, ge=0)
    """Replicas that must acknowledge a commit (WAIT). If too few answer in time, the commit fails. 0: no wait."""
    redis_wait_timeout_s: float = Field(0.3, gt=0)
    """Seconds to wait for those replicas. Must be below MANAGER_REDIS_TIMEOUT_S."""
    tenant_contexts_max: int = Field(0, ge=0)
    """Maximum number of contexts per tenant. Further creates get 429 context_quota_exceeded. 0: no limit."""
    tenant_bytes_max: int = Field(TENANT_BYTES_MAX, ge=0)
    """Maximum bytes in Redis per tenant: transcripts, stored answers and 4 KiB for each context. Beyond it a create or
    turn gets 429 context_quota_exceeded. A running turn is not committed. 0: no limit."""
    redis_max_connections: int = Field(32, ge=1)
    """Maximum connections to each Redis node. Further calls wait within the timeout."""
    redis_ca_file: Path | None = None
    """PEM certificates of the CAs that sign Redis' certificate (rediss://). Empty: the system's CAs."""
    redis_cert_file: Path | None = None
    """PEM certificate shown to Redis. Empty: none."""
    redis_key_file: Path | None = None
    """PEM private key of that certificate."""
    sweep_interval_s: float = Field(5.0, gt=0)
    """Seconds between sweeps. One manager sweeps for all. Expiry is exact without sweeps."""
    tombstone_s: int = Field(3600, ge=0)
    """Seconds for which an expired session answers 'expired'. After that it is not found."""
    min_ttl_s: int = Field(MIN_TTL_S, ge=1)
    """Shortest life in seconds that a client may request."""
    max_ttl_s: int = Field(MAX_TTL_S, ge=1)
    """Longest life in seconds that a client may request."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of the Prometheus metrics. 0: no metrics."""
    metrics_host: str = "127.0.0.1"
    """Address of the Prometheus metrics."""
    max_concurrent_rpcs: int = Field(1000, ge=1)
    """Maximum calls in progress. Further calls fail at once."""
    drain_s: float = Field(5.0, ge=0)
    """Seconds that running calls have to finish at shutdown."""
    log_level: str = "INFO"
    """Lowest level of the log lines: DEBUG, INFO, WARNING or ERROR."""

    @model_validator(mode="after")
    def _waits_that_can_be_kept(self) -> Self:
        scheme = self.redis_url.get_secret_value().partition("://")[0]
        if self.redis_wait_replicas and scheme.endswith("+cluster"):
            raise ValueError("MANAGER_REDIS_WAIT_REPLICAS must be 0 with a Redis Cluster")
        if self.redis_wait_replicas and self.redis_wait_timeout_s >= self.redis_timeout_s:
            raise ValueError("MANAGER_REDIS_WAIT_TIMEOUT_S must be below MANAGER_REDIS_TIMEOUT_S")
        return self
