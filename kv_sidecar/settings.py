"""Settings of the kv-sidecar process, from `SIDECAR_…` variables; read in `__main__` only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from contextcache.process.settings import TlsSettings, TracingSettings
from kv_sidecar.limits import Limits
from kv_sidecar.moving.pulling import PeerRules
from kv_sidecar.store.objects import check_store_url

_CONTAINER = Path("/sys/fs/cgroup")
"""Files of this process's own container (cgroup v2)."""
_PORT_MAX = 65535
_PROCESS_BYTES = 512 << 20
"""Memory beside the arena: the process, blocks on their way to a shared store, a block for each thread and stream."""


class SidecarSettings(TlsSettings, TracingSettings):
    """One sidecar beside one engine."""

    model_config = SettingsConfigDict(env_prefix="SIDECAR_")

    unix_socket: Path | None = None
    """Path of the Unix socket for the engine in the same pod. Empty: none."""
    listen: str = "127.0.0.1:50061"
    """host:port for gateways, turn processes and peers. Empty: none."""
    data_dir: Path = Path("data/sidecar")
    """Directory of blocks and manifests, for one process at a time."""
    memory_limit_bytes: int | None = Field(None, ge=0)
    """Bytes of the memory tier. The sidecar allocates them at the start and shares them with the engine (the arena). 0:
    no memory tier, and the engine saves and loads no KV. Empty: a quarter of the container's memory limit, or 1 GiB
    without a limit."""
    disk_limit_bytes: int = Field(32 << 30, ge=0)
    """Maximum bytes of blocks on disk. From 95 % the sidecar evicts the least recently used contexts, down to 90 %. 0:
    no limit but the volume's size, and a save on a full volume fails."""
    tenant_guarantee_bytes: int = Field(0, ge=0)
    """Bytes of blocks of each tenant that other tenants' saves cannot evict. Saves may fail if all tenants together
    reserve more than SIDECAR_DISK_LIMIT_BYTES. 0: none."""
    tenant_limit_bytes: int = Field(0, ge=0)
    """Maximum bytes of one tenant's blocks on this disk. Saves beyond it fail, and new contexts get a 429. 0: no
    limit."""
    promised_share: float = Field(0.5, ge=0, le=0.8)
    """Share of SIDECAR_DISK_LIMIT_BYTES whose KV clients may protect from eviction for a time (`kv_hints`). Half of
    this share of the memory tier may be pinned. A tenant gets at most as much as is still free, and half of
    SIDECAR_TENANT_LIMIT_BYTES. 0, or no disk limit: no promises."""
    manager: str = ""
    """gRPC address of the context manager. The sidecar asks it which stored KV no session names any more. Empty: such
    KV expires at its TTL."""
    orphan_after_s: int = Field(300, ge=1)
    """Seconds after the seal before KV that no session names is freed. Longer than a create waits for its seal and its
    commit."""
    block_tokens: int = Field(256, ge=1, le=65536)
    """Minimum tokens in one block file. A file holds whole blocks of the engine."""
    collect_interval_s: float = Field(30.0, gt=0)
    """Seconds between two passes of the collector."""
    io_threads: int = Field(4, ge=1, le=64)
    """Threads that read and hash, and as many that write. Each holds the memory of one block."""
    peers: tuple[str, ...] = ()
    """Sidecars from which this sidecar may pull: a JSON list of host:port, host or network (10.0.0.0/8). "*": any.
    Empty: no pulls."""
    endpoint_name: str = ""
    """Name of this pod in the gateway, the same as TURN_ENDPOINT_NAME. Empty: this sidecar neither hands over contexts
    at its end nor takes any over."""
    handover_s: float = Field(20.0, ge=0)
    """Seconds after SIGTERM to save this pod's contexts, most recently used first: with a store, those that the store
    lacks; without one, all of them to peers. The pod's grace period must be longer. 0: none."""
    handover_peers: tuple[str, ...] = ()
    """Sidecars that may take over contexts: a JSON list of host:port. A host stands for all its addresses (a headless
    Service). Empty: the host:port entries of SIDECAR_PEERS."""
    handover_address: str = ""
    """host:port under which peers reach this sidecar. Empty: SIDECAR_LISTEN."""
    store_url: str = ""
    """Store that all pods of a release share, so that KV outlives its pod: s3://bucket/path, gs://…, az://… (with the
    credentials of their own tools) or file:///directory on a shared mount. Empty: none."""
    store_keys_file: Path | None = None
    """JSON file of the encryption keys for KV in the store, by tenant. A change takes effect within seconds. Empty: no
    encryption."""
    store_bytes_per_s: int = Field(0, ge=0)
    """Maximum bytes of KV written to the store per second. 0: no limit."""
    store_limit_bytes: int = Field(0, ge=0)
    """Maximum bytes of blocks in the store, over the whole release. From 95 % a collector pass evicts the least
    recently used contexts, down to 90 %. Saves never fail for it. 0: no limit."""
    store_tenant_limit_bytes: int = Field(0, ge=0)
    """Maximum bytes of each tenant's blocks in the store, by the same rule. 0: no limit."""
    events_listen: str = ""
    """host:port on which routers of other projects subscribe to KV events in vLLM's format (ZeroMQ, not encrypted). The
    next port serves replays. Empty: no events."""
    events_tenants: tuple[str, ...] = ()
    """Tenants whose events are published: a JSON list. "*": all. Events have the token ids of prompts and answers."""
    events_topic: str = Field("", max_length=256)
    """Topic of the events. llm-d expects kv@<pod>@<model>. Empty: none."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of the Prometheus endpoint. 0: off."""
    log_level: str = "INFO"
    """Python log level."""

    metrics_host: str = "127.0.0.1"
    """Address of the Prometheus endpoint; 0.0.0.0 in a pod."""

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

    @model_validator(mode="after")
    def _has_events(self) -> SidecarSettings:
        if self.events_listen:
            host, _, port = self.events_listen.rpartition(":")
            if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < _PORT_MAX:
                raise ValueError(f"SIDECAR_EVENTS_LISTEN must be host:port, with a port of 1 to {_PORT_MAX - 1}")
            if not self.events_tenants:
                raise ValueError("set SIDECAR_EVENTS_TENANTS too: SIDECAR_EVENTS_LISTEN alone publishes no events")
        return self

    def addresses(self) -> list[str]:
        """Return the gRPC addresses to bind, the TCP one first."""
        unix = [] if self.unix_socket is None else [f"unix://{self.unix_socket.absolute()}"]
        return [*([self.listen] if self.listen else []), *unix]

    def memory_bytes(self) -> int:
        """Return the size of the memory tier."""
        if self.memory_limit_bytes is not None:
            return self.memory_limit_bytes
        return 1 << 30 if (limit_bytes := _container_bytes()) is None else limit_bytes // 4

    def shortages(self) -> Iterator[str]:
        """Yield a warning for each limit of the container that is too small. An operator may raise it later."""
        limit_bytes, wanted_bytes = _container_bytes(), self.memory_bytes() + _PROCESS_BYTES
        if limit_bytes is not None and limit_bytes < wanted_bytes:
            yield (
                f"the kernel may kill the container: its memory limit is {limit_bytes} bytes, "
                f"arena and process need {wanted_bytes}"
            )
        size_bytes = shutil.disk_usage(self.data_dir).total
        if size_bytes < self.disk_limit_bytes:
            yield (
                "the disk fills before its limit, and saves then fail: SIDECAR_DISK_LIMIT_BYTES is "
                f"{self.disk_limit_bytes}, the filesystem of SIDECAR_DATA_DIR has {size_bytes} bytes"
            )

    def limits(self) -> Limits:
        """Return the bounds of the parts."""
        return Limits(**self.model_dump(include={field.name for field in fields(Limits)}))

    @property
    def peer_address(self) -> str:
        """host:port under which peers reach this sidecar."""
        return self.handover_address or self.listen

    @property
    def takers(self) -> tuple[str, ...]:
        """host:port of the peers that take contexts over; a host may have several addresses."""
        return self.handover_peers or tuple(peer for peer in self.peers if ":" in peer and "/" not in peer)


def _container_bytes() -> int | None:
    """Return the memory limit of this container; None: it has none."""
    try:
        limit = (_CONTAINER / "memory.max").read_text().strip()
    except OSError:
        return None
    return int(limit) if limit.isdecimal() else None
