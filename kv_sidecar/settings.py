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
from kv_sidecar.store.collector import CollectorLimits
from kv_sidecar.store.objects import check_store_url
from kv_sidecar.store.writer import SharedLimits

_CONTAINER = Path("/sys/fs/cgroup")
"""Of this process's own container (cgroup v2)."""


class SidecarSettings(TlsSettings, TracingSettings):
    """One sidecar beside one engine."""

    model_config = SettingsConfigDict(env_prefix="SIDECAR_", frozen=True, extra="ignore")

    unix_socket: Path | None = Field(
        None, description="Path of the Unix socket for the engine in the same pod. Empty: none."
    )
    listen: str = Field(
        "127.0.0.1:50061", description="host:port for gateways, turn middleware and peers. Empty: none."
    )
    data_dir: Path = Field(
        Path("data/sidecar"), description="Directory of blocks and manifests, for one process at a time."
    )
    memory_limit_bytes: int | None = Field(
        None,
        ge=0,
        description="Bytes of the memory tier. The sidecar allocates them at the start and shares them with the "
        "engine (the arena). 0: no memory tier; blocks travel as gRPC frames. Empty: a quarter of the "
        "container's memory limit, or 1 GiB without a limit.",
    )
    disk_limit_bytes: int = Field(
        32 << 30,
        ge=0,
        description="Maximum bytes of blocks on disk. From 95 % the sidecar evicts the least recently used contexts, "
        "down to 90 %. 0: no limit but the volume's size, and a save on a full volume fails.",
    )
    tenant_guarantee_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of blocks of each tenant that other tenants' saves cannot evict. Saves may fail if all "
        "tenants together reserve more than SIDECAR_DISK_LIMIT_BYTES. 0: none.",
    )
    tenant_limit_bytes: int = Field(
        0,
        ge=0,
        description="Maximum bytes of one tenant's blocks on this disk. Saves beyond it fail, and new contexts get a "
        "429. 0: no limit.",
    )
    manager: str = Field(
        "",
        description="gRPC address of the context manager. The sidecar asks it which stored KV no session names any "
        "more. Empty: such KV expires at its TTL.",
    )
    manager_timeout_s: float = Field(2.0, gt=0, description="Deadline of one such call in seconds.")
    orphan_after_s: int = Field(
        300,
        ge=1,
        description="Seconds after the seal before KV that no session names is freed. Longer than a create waits for "
        "its seal and its commit.",
    )
    block_tokens: int = Field(
        256, ge=1, le=65536, description="Minimum tokens in one block file. A file holds whole blocks of the engine."
    )
    block_size_bytes_max: int = Field(
        256 << 20,
        ge=1 << 12,
        description="Maximum bytes of one block file. It bounds the memory of one frame stream.",
    )
    frame_streams_max: int = Field(
        4,
        ge=1,
        le=64,
        description="Block files assembled from frames at one time. Further streams wait (flow control).",
    )
    collect_interval_s: float = Field(30.0, gt=0, description="Seconds between two passes of the collector.")
    save_deadline_s: int = Field(
        120, ge=1, description="Seconds after its last block before an unsealed save is dropped."
    )
    saves_max: int = Field(1024, ge=1, description="Maximum saves in flight. Further saves fail.")
    tombstone_s: int = Field(3600, ge=0, description="Seconds for which a deleted name refuses a late save.")
    tombstones_max: int = Field(
        65536, ge=1, description="Number of deleted names remembered. The oldest are forgotten first."
    )
    spare_s: int = Field(
        300, ge=0, description="Seconds for which the blocks of an incomplete context wait for its next save."
    )
    leftover_s: int = Field(
        600, ge=1, description="Seconds after which unannounced, unfinished and quarantined files are removed."
    )
    leases_max: int = Field(
        1024,
        ge=1,
        description="Maximum number of concurrent loads that hold a lease. Further loads still run, but their blocks "
        "may be evicted before they end.",
    )
    lease_s: int = Field(
        300,
        ge=1,
        description="Maximum seconds for which a load without an end keeps its blocks in memory and on disk.",
    )
    prefetch_blocks: int = Field(1, ge=0, le=8, description="Blocks to read ahead of the block that the engine copies.")
    io_threads: int = Field(
        4,
        ge=1,
        le=64,
        description="Threads that read and hash, and as many that write. Each holds the memory of one block.",
    )
    waiters_max: int = Field(
        4096, ge=1, description="Maximum calls that wait for a seal or a report. Further calls get no wait."
    )
    reports_max: int = Field(4096, ge=1, description="Maximum number of load reports kept.")
    report_s: int = Field(60, ge=1, description="Seconds for which a load report is kept.")
    peers: tuple[str, ...] = Field(
        (),
        description="Sidecars from which this sidecar may pull: a JSON list of host:port, host or network "
        '(10.0.0.0/8). "*": any. Empty: no pulls.',
    )
    pulls_max: int = Field(
        8, ge=1, description="Maximum pulls from peers at one time, half of them for prefixes. Further pulls fail."
    )
    pull_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Maximum seconds of one pull, plus the time of its bytes at SIDECAR_PULL_BYTES_PER_S_MIN. A "
        "request may set less.",
    )
    pull_bytes_per_s_min: int = Field(
        50_000_000, ge=1, description="Slowest rate of a pull in bytes per second. Larger contexts get more time by it."
    )
    pull_manifest_timeout_s: float = Field(
        1.0, gt=0, description="Maximum seconds to wait for a peer's manifest of a few KB."
    )
    endpoint_name: str = Field(
        "",
        description="Name of this pod in the gateway, the same as TURN_ENDPOINT_NAME. Empty: this sidecar neither "
        "hands over contexts at its end nor takes any over.",
    )
    handover_s: float = Field(
        20.0,
        ge=0,
        description="Seconds after SIGTERM in which peers take over this pod's contexts, most recently used first. "
        "Applies without a shared store. The pod's grace period must be longer. 0: none.",
    )
    handover_bytes_max: int = Field(
        16 << 30, ge=0, description="Bytes of contexts that peers take over at the end of this sidecar. 0: no limit."
    )
    handover_peers: tuple[str, ...] = Field(
        (),
        description="Sidecars that may take over contexts: a JSON list of host:port. A host stands for all its "
        "addresses (a headless Service). Empty: the host:port entries of SIDECAR_PEERS.",
    )
    handover_address: str = Field(
        "", description="host:port under which peers reach this sidecar. Empty: SIDECAR_LISTEN."
    )
    store_url: str = Field(
        "",
        description="Store that all pods of a release share, so that KV outlives its pod: s3://bucket/path, gs://…, "
        "az://… (with the credentials of their own tools) or file:///directory on a shared mount. Empty: "
        "none.",
    )
    store_keys_file: Path | None = Field(
        None,
        description="JSON file of the encryption keys for KV in the store, by tenant. A change takes effect within "
        "seconds. Empty: no encryption.",
    )
    warm_contexts_max: int = Field(
        64,
        ge=0,
        description="Contexts of gone pods to take over at the start. Needs a store, SIDECAR_MANAGER and "
        "SIDECAR_ENDPOINT_NAME. 0: none, and this pod lists none for others.",
    )
    store_timeout_s: float = Field(
        10.0, gt=0, description="Maximum seconds of one call to the store, retries included."
    )
    store_bytes_per_s: int = Field(
        0, ge=0, description="Maximum bytes of KV written to the store per second. 0: no limit."
    )
    store_queue_max: int = Field(
        100_000,
        ge=1,
        description="Maximum contexts and kept conversations that wait to be written to the store. Beyond it the "
        "oldest are dropped, kept conversations first.",
    )
    store_flush_s: float = Field(
        20.0,
        ge=0,
        description="Seconds after SIGTERM to write contexts to the store that it lacks, most recently used first.",
    )
    store_grace_s: int = Field(
        3600,
        ge=60,
        description="Age in seconds from which an unreferenced object is removed from the store. Longer than "
        "the write of any context.",
    )
    store_limit_bytes: int = Field(
        0,
        ge=0,
        description="Maximum bytes of blocks in the store, over the whole release. From 95 % a collector pass evicts "
        "the least recently used contexts, down to 90 %. Saves never fail for it. 0: no limit.",
    )
    store_tenant_limit_bytes: int = Field(
        0, ge=0, description="Maximum bytes of each tenant's blocks in the store, by the same rule. 0: no limit."
    )
    store_collect_interval_s: int = Field(
        900, ge=1, description="Seconds between two passes over the store, over all pods together."
    )
    max_concurrent_rpcs: int = Field(
        256, ge=8, description="Maximum calls served at one time. gRPC refuses further calls."
    )
    drain_s: float = Field(5.0, ge=0, description="Seconds that running calls have to finish after SIGTERM.")
    tenants_shown_max: int = Field(
        20, ge=0, le=1000, description="Number of tenants that the metrics show by name, largest first. 0: none."
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of the Prometheus endpoint. 0: off.")
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
            raise ValueError("every entry must be host:port")
        return value

    @field_validator("store_url")
    @classmethod
    def _is_a_store(cls, value: str) -> str:
        check_store_url(value)
        return value

    @model_validator(mode="after")
    def _listens_somewhere(self) -> SidecarSettings:
        if not self.listen and self.unix_socket is None:
            raise ValueError("set SIDECAR_LISTEN or SIDECAR_UNIX_SOCKET, or both")
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
