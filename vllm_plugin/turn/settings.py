"""Settings of the turn middleware, from the environment of vLLM's API server."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from contextcache.process.settings import TlsSettings, TracingSettings


class TurnSettings(TlsSettings, TracingSettings):
    """Everything a deployment can say to the turn middleware."""

    model_config = SettingsConfigDict(env_prefix="TURN_", frozen=True, extra="ignore")

    manager: str = Field("127.0.0.1:50051", description="gRPC address of the context manager")
    sidecar: str = Field("127.0.0.1:50061", description="gRPC address of this pod's kv-sidecar; unix:///path works")
    lmcache_url: str = Field(
        "",
        description="HTTP address of the LMCache server of this engine, http://host:port: it keeps KV in the place of "
        "our connector and sidecar. Whole chunks of tokens only, a delete that nobody verifies, no authentication, so "
        "keep it on the pod network (docs/guides/lmcache.md). Empty: the sidecar does",
    )
    lmcache_coordinator_url: str = Field(
        "", description="HTTP address of LMCache's coordinator, which deletes and pins; required with TURN_LMCACHE_URL"
    )
    lmcache_model: str = Field(
        "", description="model as the engine was given it (vLLM's --model); required with TURN_LMCACHE_URL"
    )
    lmcache_world_size: int = Field(1, description="ranks of the engine: tensor times pipeline parallel", ge=1)
    lmcache_listen: str = Field(
        "",
        description="gRPC address at which this process answers the gateway in the sidecar's place, so that a deleted "
        "context is deleted in LMCache; required with TURN_LMCACHE_URL",
    )
    lmcache_deadline_ms: int = Field(
        2_000, description="ms for one call to LMCache, its retries included; a delete is several", gt=0
    )
    secret_file: Path = Field(description="file with the deployment's signing secret, 32 bytes or more")
    endpoint_name: str = Field(
        "engine-0", description="this pod's name as the gateway knows it: the holder of what it saves"
    )
    single_tenant: str = Field(
        "", description="serve requests without an identity header as this tenant; empty: leave them alone"
    )
    max_body_bytes: int = Field(32 << 20, description="bytes; larger request bodies get 413", gt=0)
    tenant_turns_max: int = Field(
        0,
        description="requests of one tenant in flight in this pod's API server process, with and without a context; "
        "more get 429 too_many_in_flight; 0: no limit",
        ge=0,
    )
    tenant_bytes_max: int = Field(
        0, description="bytes of one tenant's request bodies in hand in this pod; more get 429; 0: no limit", ge=0
    )
    quota_deadline_ms: int = Field(
        200,
        description="ms a create waits for the sidecar to say what the tenant has before it goes on",
        gt=0,
    )
    lease_ttl_ms: int = Field(
        15_000, description="ms; a turn whose process died blocks its session for at most this long", ge=1000
    )
    replay_threshold: float = Field(
        0.8, description="share of the transcript's characters a prompt must repeat to count as a replay", gt=0, le=1
    )
    seal_deadline_ms: int = Field(
        2_000, description="ms a create waits for its KV to be durable before it answers all the same", ge=0, le=30_000
    )
    report_deadline_ms: int = Field(
        50,
        description="ms to wait for the connector's load report before the receipt says less; at the end of an answer "
        "that began with cached tokens at least 500",
        ge=0,
        le=1000,
    )
    kept_ttl_s: int = Field(
        3_600,
        ge=60,
        description="seconds for which the KV of a request without a context is kept after it was last used, for keys "
        "that ask for it",
    )
    engine_timeout_s: float = Field(
        600.0,
        gt=0,
        description="seconds without a byte from the engine until a turn is given up; covers a queue and a long answer",
    )
    client_timeout_s: float = Field(
        120.0, gt=0, description="seconds a client may leave a piece of its answer unread until its turn is given up"
    )
    drain_timeout_s: float = Field(
        60.0,
        gt=0,
        description="seconds after SIGTERM until turns that still run are given up; vLLM's --shutdown-timeout, after "
        "which it would leave them without an end",
    )
    rpc_deadline_ms: int = Field(2_000, description="ms for one call to the manager or the sidecar", gt=0)

    @model_validator(mode="after")
    def _one_body_fits(self) -> Self:
        if 0 < self.tenant_bytes_max < self.max_body_bytes:
            # A body between the two would be asked to come again for ever.
            raise ValueError("TURN_TENANT_BYTES_MAX is 0 or at least TURN_MAX_BODY_BYTES")
        return self

    @model_validator(mode="after")
    def _lmcache_is_whole(self) -> Self:
        needed = (self.lmcache_coordinator_url, self.lmcache_model, self.lmcache_listen)
        if self.lmcache_url and not all(needed):
            # Without them a context that is deleted would go on living in LMCache.
            raise ValueError(
                "TURN_LMCACHE_URL needs TURN_LMCACHE_COORDINATOR_URL, TURN_LMCACHE_MODEL and TURN_LMCACHE_LISTEN"
            )
        return self
