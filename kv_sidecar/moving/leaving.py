"""The story of a pod that ends and shares no store: its peers take its contexts over, the one used last first.

1. Who could take any: peers that say which pod they belong to, whose engine made the same kind of KV, and that stay.
2. Of each context: the manager notes the peer (the pointer before the bytes), the peer is asked to pull
   from here, and once it has sealed the KV the manager makes it the holder, unless that is another by now.
3. It ends when all is handed over, with its time, or with its bytes. Whatever breaks off leaves a session that names
   this pod as its holder still: its next turn computes, or finds what a peer has; a delete reaches both.

Meanwhile this sidecar serves as before: what the engine beside it saves on its way out is handed over too.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contextcache.errors import ContextCacheError, ContextExpired, ContextNotFound
from contextcache.model import CacheRef, SaveOutcome, SessionId, TenantId
from contextcache.process.crash_points import crash_point
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.crash_points import AFTER_HANDOVER_NOTE, AFTER_HANDOVER_SEAL
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.sealed.index import ManifestRecord

log = logging.getLogger(__name__)

_AT_ONCE = 4
"""Contexts on their way; a peer takes `SIDECAR_PULLS_MAX`."""
_RESOLVE_S = 2.0
_SEAL_MS = 30_000


@dataclass(frozen=True, slots=True)
class HandOverLimits:
    """What handing over may take, and who takes part in it."""

    timeout_s: float
    """0: nothing is handed over."""
    endpoint: str
    """This pod, as sessions name it; empty: nobody could be told where the contexts went."""
    address: str
    """host:port under which peers reach this sidecar."""
    peers: tuple[str, ...]
    """host:port of those asked; a host may have several addresses."""
    bytes_max: int = 16 << 30
    """Bytes of all contexts together, shared blocks counted with each: peers keep most of their own KV."""


class Taker(Protocol):
    """Another sidecar. Every call ends within its own deadline and raises ContextCacheError."""

    async def stats(self, *, beginnings_after: int = 0) -> pb.StatsResponse:
        """Return who it is and whether it stays."""
        ...

    async def pull_context(self, tenant: TenantId, cache_refs: Sequence[CacheRef], *, peer: str) -> str:
        """Have it fetch KV; return `started`, `present` or `refused`."""
        ...

    async def wait_sealed(self, tenant: TenantId, cache_ref: CacheRef, *, timeout_ms: int) -> SaveOutcome:
        """Return whether it has it."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class Sessions(Protocol):
    """Whoever knows the sessions."""

    async def note_holder(self, tenant: TenantId, session_id: SessionId, *, holder: str, instead_of: str = "") -> None:
        """See ContextCacheManager.note_holder."""
        ...


@dataclass(slots=True)
class _Peer:
    name: str
    door: Taker
    given_bytes: int = 0


class HandOver:
    """Used once, when the process ends."""

    def __init__(
        self,
        sealed: Callable[[], Sequence[ManifestRecord]],
        sessions: Sessions,
        *,
        connect: Callable[[str], Taker],
        fingerprint: Callable[[], str | None],
        limits: HandOverLimits,
        metrics: SidecarMetrics,
    ) -> None:
        """`sealed`: what is here of sessions, the one used longest ago first; `connect`: does not wait."""
        self._sealed = sealed
        self._sessions = sessions
        self._connect = connect
        self._fingerprint = fingerprint
        self._limits = limits
        self._metrics = metrics
        self._left_bytes = limits.bytes_max
        self._tried: set[CacheRef] = set()

    async def run(self) -> int:
        """Hand over what there is time and room for; return how many contexts have a new holder."""
        doors: list[Taker] = []
        moved = 0
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                peers = await self._peers(doors)
                while peers and (hottest := self._hottest()):
                    # A few at a time: what is saved meanwhile comes before what has cooled.
                    ends = await asyncio.gather(*(self._hand_over(record, peers) for record in hottest))
                    moved += sum(ends)
        except TimeoutError:
            log.info("no time left to hand over contexts")
        finally:
            await asyncio.gather(*(door.close() for door in doors), return_exceptions=True)
        return moved

    def _hottest(self) -> list[ManifestRecord]:
        """Return the next contexts, each with the newest it has, that have not been tried and fit."""
        seen: set[tuple[TenantId, SessionId]] = set()
        chosen: list[ManifestRecord] = []
        for record in reversed(self._sealed()):
            if len(chosen) == _AT_ONCE:
                break
            session = (record.tenant, record.session_id)
            if session in seen:
                continue
            seen.add(session)
            if record.cache_ref in self._tried or (self._limits.bytes_max and record.size_bytes > self._left_bytes):
                continue
            self._left_bytes -= record.size_bytes
            self._tried.add(record.cache_ref)
            chosen.append(record)
        return chosen

    async def _hand_over(self, record: ManifestRecord, peers: Sequence[_Peer]) -> bool:
        peer = min(peers, key=lambda it: it.given_bytes)
        peer.given_bytes += record.size_bytes
        try:
            outcome = await self._moved(record, peer)
        except (ContextNotFound, ContextExpired):
            outcome = "gone"
        except ContextCacheError as exc:
            outcome = "failed"
            log.warning("context not handed over", extra={"cache_ref": record.cache_ref, "reason": exc.code})
        self._metrics.handed_over.labels(outcome).inc()
        return outcome == "moved"

    async def _moved(self, record: ManifestRecord, peer: _Peer) -> str:
        """Have one peer take one context."""
        tenant, session_id, cache_ref = record.tenant, record.session_id, record.cache_ref
        await self._sessions.note_holder(tenant, session_id, holder=peer.name)
        crash_point(AFTER_HANDOVER_NOTE)
        if await peer.door.pull_context(tenant, [cache_ref], peer=self._limits.address) == "refused":
            return "refused"
        if not (await peer.door.wait_sealed(tenant, cache_ref, timeout_ms=_SEAL_MS)).is_sealed:
            return "failed"
        crash_point(AFTER_HANDOVER_SEAL)
        await self._sessions.note_holder(tenant, session_id, holder=peer.name, instead_of=self._limits.endpoint)
        return "moved"

    async def _peers(self, doors: list[Taker]) -> list[_Peer]:
        addresses = await _addresses(self._limits.peers)
        doors += [self._connect(address) for address in sorted(addresses - {self._limits.address})]
        told = await asyncio.gather(*(door.stats() for door in doors), return_exceptions=True)
        found = []
        for door, stats in zip(doors, told, strict=True):
            if isinstance(stats, ContextCacheError):
                continue
            if isinstance(stats, BaseException):
                raise stats
            is_alike = set(stats.fingerprints) == {self._fingerprint()}
            if stats.endpoint not in {"", self._limits.endpoint} and is_alike and not stats.draining:
                found.append(_Peer(stats.endpoint, door))
        return found


async def _addresses(peers: Iterable[str]) -> set[str]:
    """Return host:port of every address that the hosts have."""
    found: set[str] = set()
    loop = asyncio.get_running_loop()
    for peer in peers:
        host, _, port = peer.rpartition(":")
        try:
            async with asyncio.timeout(_RESOLVE_S):
                infos = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, TimeoutError):
            log.warning("peer name has no address", extra={"peer": peer})
            continue
        for *_, address in infos:
            ip = str(address[0])
            found.add(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}")
    return found
