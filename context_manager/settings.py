"""How a context manager is configured. Read once, in `__main__`."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from context_manager.store import TENANT_BYTES_MAX
from contextcache.model import MAX_TTL_S, MIN_TTL_S
from contextcache.process.settings import TlsSettings, TracingSettings


class ManagerSettings(TlsSettings, TracingSettings):
    """Environment variables `MANAGER_…`."""

    model_config = SettingsConfigDict(env_prefix="MANAGER_", frozen=True, extra="ignore")

    listen: str = Field(
        "127.0.0.1:50051", description="gRPC address; port 0 takes any free one. Loopback unless the chart says more."
    )
    redis_url: SecretStr = Field(
        SecretStr("redis://127.0.0.1:6379/0"),
        description="redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://host:26379/<service>; "
        "an ACL user and password as user:password@. Secret because of the password.",
    )
    redis_timeout_s: float = Field(
        0.7, gt=0, description="seconds until a silent Redis is given up, so that clients hear of it within a second"
    )
    redis_wait_replicas: int = Field(
        0,
        ge=0,
        description="replicas that must have a commit before it is acknowledged (WAIT); with fewer in time the commit "
        "counts as not made; 0: Redis' own promise",
    )
    redis_wait_timeout_s: float = Field(
        0.3, gt=0, description="seconds to wait for those replicas; below MANAGER_REDIS_TIMEOUT_S"
    )
    tenant_contexts_max: int = Field(
        0, ge=0, description="contexts one tenant may have; one more is 429 context_quota_exceeded; 0: no limit"
    )
    tenant_bytes_max: int = Field(
        TENANT_BYTES_MAX,
        ge=0,
        description="bytes in Redis one tenant may have: transcripts, kept answers, 4 KiB for each context; more is "
        "429 context_quota_exceeded, and a turn that runs already is not committed; 0: no limit",
    )
    redis_max_connections: int = Field(
        32, ge=1, description="connections to each Redis node; calls beyond them wait within the timeout"
    )
    redis_ca_file: Path | None = Field(
        None, description="PEM certificates of who may sign Redis' certificate (rediss://); empty: the system's"
    )
    redis_cert_file: Path | None = Field(None, description="PEM certificate shown to Redis; empty: none")
    redis_key_file: Path | None = Field(None, description="its PEM private key")
    sweep_interval_s: float = Field(
        5.0,
        gt=0,
        description="seconds between sweeps, of one manager for all; expiry is exact without them",
    )
    tombstone_s: int = Field(
        3600, ge=0, description="seconds an expired session answers 'expired' before it is simply not found"
    )
    min_ttl_s: int = Field(MIN_TTL_S, ge=1, description="shortest life in seconds a client may ask for")
    max_ttl_s: int = Field(MAX_TTL_S, ge=1, description="longest life in seconds a client may ask for")
    metrics_port: int = Field(0, ge=0, le=65535, description="port of Prometheus metrics; 0 turns them off")
    metrics_host: str = Field("127.0.0.1", description="address the metrics listen on")
    max_concurrent_rpcs: int = Field(
        1000, ge=1, description="calls in progress; more are refused at once rather than queued"
    )
    drain_s: float = Field(5.0, ge=0, description="seconds that running calls may take to finish at shutdown")
    log_level: str = Field("INFO", description="least level of the log lines: DEBUG, INFO, WARNING or ERROR")

    @model_validator(mode="after")
    def _waits_that_can_be_kept(self) -> Self:
        scheme = self.redis_url.get_secret_value().partition("://")[0]
        if self.redis_wait_replicas and scheme.endswith("+cluster"):
            raise ValueError("MANAGER_REDIS_WAIT_REPLICAS does not work with a Redis Cluster: leave it at 0")
        if self.redis_wait_replicas and self.redis_wait_timeout_s >= self.redis_timeout_s:
            raise ValueError("MANAGER_REDIS_WAIT_TIMEOUT_S must be below MANAGER_REDIS_TIMEOUT_S")
        return self

    @field_validator("redis_ca_file", "redis_cert_file", "redis_key_file", mode="before")
    @classmethod
    def _none_when_empty(cls, value: object) -> object:
        return None if value == "" else value
