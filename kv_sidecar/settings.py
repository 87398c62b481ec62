"""Settings of the kv-sidecar process, from `SIDECAR_…` variables; read in `__main__` only."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from contextcache.process.settings import TlsSettings, TracingSettings
from kv_sidecar.moving.leaving import HandOverLimits
from kv_sidecar.moving.peers import PeerRules, PullLimits
from kv_sidecar.moving.warming import WarmingLimits
from kv_sidecar.saves import CatalogLimits
from kv_sidecar.shared.collector import CollectorLimits
from kv_sidecar.shared.object_store import check_store_url
from kv_sidecar.shared.tier import SharedLimits

_CONTAINER = Path("/sys/fs/cgroup")
"""Of this process's own container (cgroup v2)."""


class SidecarSettings(TlsSettings, TracingSettings):
    """One sidecar beside one engine."""

    model_config = SettingsConfigDict(env_prefix="SIDECAR_", frozen=True, extra="ignore")

    unix_socket: Path | None = Field(
        None, description="Path of the Unix socket for the engine in the same pod; empty: none."
    )
    listen: str = Field(
        "127.0.0.1:50061", description="host:port for gateways, turn middleware and peers; empty: none."
    )
    data_dir: Path = Field(
        Path("data/sidecar"), description="Directory of blocks and manifests; one process at a time."
    )
    memory_limit_bytes: int | None = Field(
        None,
        ge=0,
        description="Bytes of the memory tier, taken at the start and shared with the engine (the arena); 0: nothing "
        "is kept in memory and blocks travel as gRPC frames; empty: a quarter of the container's memory limit, 1 GiB "
        "where it has none.",
    )
    disk_limit_bytes: int = Field(
        32 << 30,
        ge=0,
        description="Bytes of blocks on disk, a hard limit: from 95 % on the contexts used longest ago make room, down "
        "to 90 %; 0: none, then the volume's size is the limit and saves beyond it are refused.",
    )
    tenant_guarantee_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of blocks of each tenant that no other tenant's saves push out; with all tenants' together "
        "above SIDECAR_DISK_LIMIT_BYTES saves may be refused; 0: none.",
    )
    tenant_limit_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of blocks one tenant may have on this disk, a hard limit: its saves beyond it are refused, "
        "its new contexts get 429; 0: none.",
    )
    manager: str = Field(
        "",
        description="gRPC address of the context manager, asked which stored KV no session names any more; empty: such "
        "KV goes by its TTL.",
    )
    manager_timeout_s: float = Field(2.0, gt=0, description="Seconds for one such question.")
    orphan_after_s: int = Field(
        300,
        ge=1,
        description="Seconds after its seal from which KV that no session names is freed; longer than a create waits "
        "for its seal and its commit.",
    )
    block_tokens: int = Field(
        256, ge=1, le=65536, description="Least tokens in one block file; it holds whole blocks of the engine's."
    )
    block_size_bytes_max: int = Field(
        256 << 20,
        ge=1 << 12,
        description="Largest block file accepted, in bytes; bounds the memory of one frame stream.",
    )
    frame_streams_max: int = Field(
        4, ge=1, le=64, description="Block files put together from frames at once; others wait (flow control)."
    )
    collect_interval_s: float = Field(30.0, gt=0, description="Seconds between two passes of the collector.")
    save_deadline_s: int = Field(
        120, ge=1, description="Seconds after its last block from which an unsealed save is dropped."
    )
    saves_max: int = Field(1024, ge=1, description="Saves in flight; more are refused.")
    tombstone_s: int = Field(3600, ge=0, description="Seconds for which deleted names refuse a late save.")
    tombstones_max: int = Field(65536, ge=1, description="Deleted names remembered; the oldest are forgotten first.")
    spare_s: int = Field(
        300, ge=0, description="Seconds for which the blocks of a context that misses a file wait for its next save."
    )
    leftover_s: int = Field(
        600, ge=1, description="Seconds after which unannounced, unfinished and quarantined files are removed."
    )
    leases_max: int = Field(
        1024, ge=1, description="Loads that keep their blocks in place at once; one more keeps them less long."
    )
    lease_s: int = Field(
        300,
        ge=1,
        description="Longest time in seconds for which a load that nobody ends keeps its blocks in memory and on disk.",
    )
    prefetch_blocks: int = Field(1, ge=0, le=8, description="Blocks read ahead of the one the engine is copying.")
    io_threads: int = Field(
        4, ge=1, le=64, description="Threads that read and hash, and as many that write; each holds one block's memory."
    )
    waiters_max: int = Field(4096, ge=1, description="Calls that may wait for a seal or a report; more get no wait.")
    reports_max: int = Field(4096, ge=1, description="Load reports kept.")
    report_s: int = Field(60, ge=1, description="Seconds for which a load report is kept.")
    peers: tuple[str, ...] = Field(
        (),
        description="Sidecars that may be pulled from, a JSON list of host:port, host or network (10.0.0.0/8); "
        '"*": any; empty: pulls are off.',
    )
    pulls_max: int = Field(8, ge=1, description="Pulls from peers at once, half of them of prefixes; more are refused.")
    pull_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Longest time of one pull, plus what its bytes take at SIDECAR_PULL_BYTES_PER_S_MIN; a request may "
        "ask for less.",
    )
    pull_bytes_per_s_min: int = Field(
        50_000_000, ge=1, description="Slowest rate of a pull, in bytes per second: larger contexts get more time."
    )
    pull_manifest_timeout_s: float = Field(
        1.0, gt=0, description="Longest wait for a peer's manifest, a few KB: one that takes longer hangs."
    )
    endpoint_name: str = Field(
        "",
        description="This pod's name as the gateway knows it, as TURN_ENDPOINT_NAME; empty: this sidecar hands no "
        "contexts on when it ends, and takes none over.",
    )
    handover_s: float = Field(
        20.0,
        ge=0,
        description="Seconds after SIGTERM in which, without a store, peers take over the contexts that are here, the "
        "one used last first; the pod's grace period has to be longer; 0: none.",
    )
    handover_bytes_max: int = Field(
        16 << 30, ge=0, description="Bytes of contexts that peers take over when this sidecar ends; 0: no limit."
    )
    handover_peers: tuple[str, ...] = Field(
        (),
        description="Sidecars that may take contexts over, a JSON list of host:port, of a host all its addresses (a "
        "headless Service); empty: those that SIDECAR_PEERS names by host:port.",
    )
    handover_address: str = Field(
        "", description="host:port under which peers reach this sidecar; empty: SIDECAR_LISTEN."
    )
    store_url: str = Field(
        "",
        description="Store that all pods of a release share, under which KV outlives its pod: s3://bucket/path, "
        "gs://…, az://… (credentials as their own tools find them) or file:///directory that all mount; empty: none.",
    )
    store_keys_file: Path | None = Field(
        None,
        description="JSON file of the keys that KV in the store is encrypted with, by tenant; a change takes effect "
        "within seconds; empty: it is not encrypted.",
    )
    warm_contexts_max: int = Field(
        64,
        ge=0,
        description="Contexts that, with a store, SIDECAR_MANAGER and SIDECAR_ENDPOINT_NAME, are taken over at the "
        "start from pods that are gone, before anybody asks for them; 0: none, and none are listed for others.",
    )
    store_timeout_s: float = Field(10.0, gt=0, description="Longest time of one call to the store, with its retries.")
    store_bytes_per_s: int = Field(
        0, ge=0, description="Bytes of KV written to the store per second, at most; 0: as many as it takes."
    )
    store_queue_max: int = Field(
        100_000,
        ge=1,
        description="Contexts and what is kept of plain requests that wait to be written to the store; the oldest give "
        "way, kept ones first.",
    )
    store_flush_s: float = Field(
        20.0,
        ge=0,
        description="Seconds after SIGTERM in which what the store lacks is written, what was used last first.",
    )
    store_grace_s: int = Field(
        3600,
        ge=60,
        description="Age in seconds from which an object that nothing names is removed from the store; longer than any "
        "context takes to be written.",
    )
    store_limit_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of blocks in the store, of the whole release: from 95 % on the contexts used longest ago "
        "leave it, down to 90 %, in its collector's pass; 0: no limit. No save is refused for it.",
    )
    store_tenant_limit_bytes: int = Field(
        0, ge=0, description="The same for each tenant's blocks in the store; 0: no limit."
    )
    store_collect_interval_s: int = Field(
        900, ge=1, description="Seconds between two passes over the store, of all pods together."
    )
    max_concurrent_rpcs: int = Field(256, ge=8, description="Calls served at once; more are refused by gRPC.")
    drain_s: float = Field(5.0, ge=0, description="Seconds that running calls get to end after SIGTERM.")
    tenants_shown_max: int = Field(
        20, ge=0, le=1000, description="Tenants whose bytes the metrics show by name, the largest; 0: none."
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of the Prometheus endpoint; 0: off.")
    log_level: str = Field("INFO", description="Python log level.")

    metrics_host: str = Field("127.0.0.1", description="Address of the Prometheus endpoint; 0.0.0.0 in a pod.")

    @field_validator("unix_socket", "memory_limit_bytes", "store_keys_file", mode="before")
    @classmethod
    def _none_when_empty(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("peers")
    @classmethod
    def _are_peers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        PeerRules(value)
        return value

    @field_validator("handover_peers")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        rules = PeerRules(("*",))
        if not all(rules.allow(peer) for peer in value):
            raise ValueError("not host:port")
        return value

    @field_validator("store_url")
    @classmethod
    def _is_a_store(cls, value: str) -> str:
        check_store_url(value)
        return value

    @model_validator(mode="after")
    def _listens_somewhere(self) -> SidecarSettings:
        if not self.listen and self.unix_socket is None:
            raise ValueError("set SIDECAR_LISTEN or SIDECAR_UNIX_SOCKET")
        return self

    def addresses(self) -> list[str]:
        """Return the gRPC addresses to bind, the TCP one first."""
        unix = [] if self.unix_socket is None else [f"unix://{self.unix_socket.absolute()}"]
        return [*([self.listen] if self.listen else []), *unix]

    def memory_bytes(self) -> int:
        """Return the size of the memory tier."""
        if self.memory_limit_bytes is not None:
            return self.memory_limit_bytes
        try:
            limit = (_CONTAINER / "memory.max").read_text().strip()
        except OSError:
            limit = "max"
        return int(limit) // 4 if limit.isdecimal() else 1 << 30

    def limits(self) -> CatalogLimits:
        """Return the bounds of the catalog."""
        return CatalogLimits(
            block_tokens=self.block_tokens,
            save_deadline_ms=self.save_deadline_s * 1000,
            max_saves=self.saves_max,
            tombstone_ms=self.tombstone_s * 1000,
            max_tombstones=self.tombstones_max,
            spare_ms=self.spare_s * 1000,
            max_waiters=self.waiters_max,
            max_leases=self.leases_max,
            lease_ms=self.lease_s * 1000,
            tenant_guarantee_bytes=self.tenant_guarantee_bytes,
        )

    def shared_limits(self) -> SharedLimits:
        """Return the bounds of the shared tier."""
        return SharedLimits(
            bytes_per_s=self.store_bytes_per_s,
            queue_max=self.store_queue_max,
            block_bytes_max=self.block_size_bytes_max,
        )

    def handover_limits(self) -> HandOverLimits:
        """Return who takes contexts over when this sidecar ends, and what that may take."""
        named = (peer for peer in self.peers if ":" in peer and "/" not in peer)
        return HandOverLimits(
            timeout_s=self.handover_s,
            bytes_max=self.handover_bytes_max,
            endpoint=self.endpoint_name,
            address=self.handover_address or self.listen,
            peers=self.handover_peers or tuple(named),
        )

    def warming_limits(self) -> WarmingLimits:
        """Return what is taken over at the start."""
        return WarmingLimits(self.endpoint_name, self.warm_contexts_max, self.collect_interval_s)

    def collector_limits(self) -> CollectorLimits:
        """Return when the store is collected, and what is left there."""
        return CollectorLimits(
            grace_s=self.store_grace_s,
            interval_s=self.store_collect_interval_s,
            limit_bytes=self.store_limit_bytes,
            tenant_limit_bytes=self.store_tenant_limit_bytes,
        )

    def pull_limits(self) -> PullLimits:
        """Return the bounds of pulls."""
        return PullLimits(
            max_pulls=self.pulls_max,
            timeout_s=self.pull_timeout_s,
            bytes_per_s_min=self.pull_bytes_per_s_min,
            block_tokens=self.block_tokens,
        )
