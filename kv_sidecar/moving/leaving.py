"""The story of a pod that ends and shares no store: its peers take its contexts over, the most recently used first.

1. The takers are peers that name their pod, whose engine makes the same kind of KV, and that do not end themselves.
2. For each context, the manager notes the peer (the pointer before the bytes), and the peer pulls from here. Once the
   peer has sealed the KV, the manager makes it the holder, unless another pod is the holder by now.
3. The hand-over ends when all contexts are handed over, or with its time or its bytes. A session whose hand-over broke
   off still names this pod. Its next turn computes, or finds the peer's KV. A delete reaches both.

Meanwhile this sidecar serves as before: contexts that its engine saves on its way out are handed over too.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from contextcache.errors import ContextCacheError, ContextExpired, ContextNotFound
from contextcache.model import CacheRef, SessionId, TenantId
from contextcache.process.crash_points import crash_point
from kv_sidecar.catalog import ContextCatalog
from kv_sidecar.client import KVSidecarClient
from kv_sidecar.crash_points import AFTER_HANDOVER_NOTE, AFTER_HANDOVER_SEAL
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.orphans import ManagerQuestions
from kv_sidecar.sealed.manifests import ManifestRecord

log = logging.getLogger(__name__)

_AT_ONCE = 4
"""Contexts handed over at once, half of the pulls that a peer runs at once."""
_RESOLVE_S = 2.0
"""Longest look-up of a peer's name in DNS."""
_SEAL_MS = 30_000
"""Longest wait for a peer to pull and seal one context."""


@dataclass(slots=True)
class _Taker:
    """Peer that takes contexts over."""

    name: str
    client: KVSidecarClient
    given_bytes: int = 0


@dataclass(slots=True)
class Leaving:
    """Hands the contexts of this pod over. Used once, when the process ends."""

    catalog: ContextCatalog
    sessions: ManagerQuestions
    metrics: SidecarMetrics
    connect: Callable[[str], KVSidecarClient]
    """Return a client at once."""
    fingerprint: str | None
    """The engine's."""
    timeout_s: float
    """Longest time of the hand-over."""
    endpoint: str
    """This pod, as sessions name it."""
    address: str
    """host:port under which peers reach this sidecar."""
    peers: Iterable[str]
    """host:port of the peers; a host may have several addresses."""
    bytes_max: int
    """Bytes of all contexts together, shared blocks counted with each: peers keep most of their own KV."""
    _chosen_bytes: int = 0
    _tried: set[CacheRef] = field(default_factory=set)

    async def run(self) -> int:
        """Hand over contexts within time and bytes; return the number of contexts with a new holder."""
        clients: list[KVSidecarClient] = []
        moved = 0
        try:
            async with asyncio.timeout(self.timeout_s):
                peers = await self._peers(clients)
                while peers and (hottest := self._hottest()):
                    # A few at a time: a context that is saved meanwhile comes before older ones.
                    ends = await asyncio.gather(*(self._hand_over(record, peers) for record in hottest))
                    moved += sum(ends)
        except TimeoutError:
            log.info("no time left to hand over contexts")
        finally:
            await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)
        return moved

    def _hottest(self) -> list[ManifestRecord]:
        """Return the next contexts, each with the newest it has, that have not been tried and fit."""
        seen: set[tuple[TenantId, SessionId]] = set()
        chosen: list[ManifestRecord] = []
        for record in reversed([it for it in self.catalog.manifests if not it.is_expendable]):
            if len(chosen) == _AT_ONCE:
                break
            session = (record.tenant, record.session_id)
            if session in seen:
                continue
            seen.add(session)
            if record.cache_ref in self._tried or record.size_bytes > self.bytes_max - self._chosen_bytes:
                continue
            self._chosen_bytes += record.size_bytes
            self._tried.add(record.cache_ref)
            chosen.append(record)
        return chosen

    async def _hand_over(self, record: ManifestRecord, peers: Sequence[_Taker]) -> bool:
        peer = min(peers, key=lambda it: it.given_bytes)
        peer.given_bytes += record.size_bytes
        try:
            outcome = await self._moved(record, peer)
        except (ContextNotFound, ContextExpired):
            outcome = "gone"
        except ContextCacheError as exc:
            outcome = "failed"
            log.warning("context not handed over", extra={"cache_ref": record.cache_ref, "reason": exc.code})
        self.metrics.handed_over.labels(outcome).inc()
        return outcome == "moved"

    async def _moved(self, record: ManifestRecord, peer: _Taker) -> str:
        """Have one peer take one context."""
        tenant, session_id, cache_ref = record.tenant, record.session_id, record.cache_ref
        await self.sessions.note_holder(tenant, session_id, holder=peer.name)
        crash_point(AFTER_HANDOVER_NOTE)
        if await peer.client.pull_context(tenant, [cache_ref], peer=self.address) == "refused":
            return "refused"
        if not (await peer.client.wait_sealed(tenant, cache_ref, timeout_ms=_SEAL_MS)).is_sealed:
            return "failed"
        crash_point(AFTER_HANDOVER_SEAL)
        await self.sessions.note_holder(tenant, session_id, holder=peer.name, instead_of=self.endpoint)
        return "moved"

    async def _peers(self, clients: list[KVSidecarClient]) -> list[_Taker]:
        addresses = await _addresses(self.peers)
        clients += [self.connect(address) for address in sorted(addresses - {self.address})]
        told = await asyncio.gather(*(client.stats() for client in clients), return_exceptions=True)
        found = []
        for client, stats in zip(clients, told, strict=True):
            if isinstance(stats, ContextCacheError):
                continue
            if isinstance(stats, BaseException):
                raise stats
            is_alike = set(stats.fingerprints) == {self.fingerprint}
            if stats.endpoint not in {"", self.endpoint} and is_alike and not stats.draining:
                found.append(_Taker(stats.endpoint, client))
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
