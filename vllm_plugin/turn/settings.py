"""Settings of the turn process, from its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from contextcache.process.settings import TlsSettings, TracingSettings


class TurnSettings(TlsSettings, TracingSettings):
    """Settings of one turn process."""

    model_config = SettingsConfigDict(env_prefix="TURN_")

    engine_url: str = "http://127.0.0.1:8000"
    """URL of vLLM, in the same pod."""
    listen_host: str = "127.0.0.1"
    """Address to listen on."""
    listen_port: int = Field(8010, ge=0, le=65535)
    """Port to listen on. 0 takes a free port."""
    log_level: str = "INFO"
    """Python log level."""
    manager: str = "127.0.0.1:50051"
    """gRPC address of the context manager."""
    sidecar: str = "127.0.0.1:50061"
    """gRPC address of this pod's kv-sidecar. unix:///path works."""
    lmcache_url: str = ""
    """HTTP address of this engine's LMCache server, http://host:port. LMCache then stores KV instead of our connector
    and sidecar. It stores whole chunks of tokens, does not verify deletes and has no authentication, so keep it on the
    pod network (docs/guides/lmcache.md). Empty: the sidecar stores KV."""
    lmcache_coordinator_url: str = ""
    """HTTP address of LMCache's coordinator, which deletes and pins. Required with TURN_LMCACHE_URL."""
    lmcache_model: str = ""
    """Model as given to the engine (vLLM's --model). Required with TURN_LMCACHE_URL."""
    lmcache_world_size: int = Field(1, ge=1)
    """Ranks of the engine: tensor parallel size times pipeline parallel size."""
    lmcache_listen: str = ""
    """gRPC address at which this process answers the gateway instead of the sidecar, so that a delete reaches LMCache.
    Required with TURN_LMCACHE_URL."""
    secret_file: Path
    """File with the deployment's signing secret, at least 32 bytes."""
    endpoint_name: str = "engine-0"
    """Name of this pod in the gateway: the holder of the KV that it saves."""
    max_body_bytes: int = Field(32 << 20, gt=0)
    """Maximum bytes of a request body. A larger body gets a 413."""
    tenant_turns_max: int = Field(0, ge=0)
    """Maximum requests of one tenant in flight in this pod's turn process, with and without a context. Further requests
    get 429 too_many_in_flight. 0: no limit."""
    tenant_bytes_max: int = Field(0, ge=0)
    """Maximum bytes of one tenant's request bodies in memory in this pod. Further bodies get a 429. 0: no limit."""
    lease_ttl_ms: int = Field(15_000, ge=1000)
    """Milliseconds. A turn whose process died blocks its session for at most this time."""
    engine_timeout_s: float = Field(600.0, gt=0)
    """Seconds without a byte from the engine before a turn fails. Must cover the queue, a long prompt, and a whole
    answer without a stream."""
    resume_timeout_s: float = Field(60.0, ge=0)
    """Seconds for which a turn, or a request whose KV is kept, waits for an engine if its own is gone, before the
    answer or in its middle. 0: it ends at once."""
    drain_timeout_s: float = Field(60.0, gt=0)
    """Seconds after SIGTERM before running turns fail. Equal to vLLM's --shutdown-timeout, after which vLLM would leave
    them without an end."""
    rpc_deadline_ms: int = Field(2_000, ge=40)
    """Milliseconds for one call to the manager, the sidecar or LMCache, and for a create's wait for durable KV. A
    create waits a tenth of it for its tenant's quota, a stream a 40th for its load report."""

    @property
    def report_deadline_ms(self) -> int:
        """Wait for a load report before an answer has ended: 50 ms by default."""
        return self.rpc_deadline_ms // 40

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if 0 < self.tenant_bytes_max < self.max_body_bytes:
            # A body between the two would be asked to come again for ever.
            raise ValueError("TURN_TENANT_BYTES_MAX must be 0 or at least TURN_MAX_BODY_BYTES")
        if self.lmcache_url and not (self.lmcache_coordinator_url and self.lmcache_model and self.lmcache_listen):
            # Without them a deleted context would stay in LMCache.
            raise ValueError(
                "TURN_LMCACHE_URL needs TURN_LMCACHE_COORDINATOR_URL, TURN_LMCACHE_MODEL and TURN_LMCACHE_LISTEN"
            )
        return self
