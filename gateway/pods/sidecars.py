"""The pods' kv-sidecars: doors to them, what KV a context has, and how to be rid of it. Knows no wire.

A sidecar is never needed for an answer: one that cannot be reached is reported as such, or collects by TTL.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from typing_extensions import override

from contextcache.clock import Clock
from contextcache.errors import CacheRefNotFound, CacheRefPending, ContextCacheError
from contextcache.model import CacheRef, CacheSessionMetadata, ForkedKV, KeptGroup, SessionId, SessionState, TenantId
from contextcache.v1 import kv_sidecar_pb2 as pb
from gateway.metrics import Metrics
from gateway.pods.endpoints import WatchedEndpoints
from gateway.pods.state import Endpoint
from gateway.ports import KVSidecar, SessionDirectory

log = logging.getLogger(__name__)

_SEALING_MS = 30_000
"""Longest a save is waited for; a younger context without sealed KV is pending, an older one has none."""
_NO_TIER = "none"
"""What a sidecar that cannot say names as its tier."""


_TIERS = {number: name.removeprefix("TIER_").lower() for name, number in pb.Tier.items()}

HolderState = Literal["sealed", "pending", "absent", "unreachable"]


@dataclass(frozen=True, slots=True)
class KVState:
    """What the holder's sidecar said."""

    state: HolderState
    size_bytes: int | None = 0
    """Bytes of the sealed KV, shared blocks counted whole; None: not known."""
    tier: str = ""
    reason: str = ""
    """Why there is no KV of the newest generation, as a short fixed phrase; empty: there is, or nobody knows."""


class SidecarClient(KVSidecar, Protocol):
    """A door that can be closed, to a sidecar that can be asked how it does."""

    async def stats(self, *, beginnings_after: int = 0) -> pb.StatsResponse:
        """Return its tiers, the engine's fingerprints, and what was asked for there. Raises SidecarUnavailable."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class Sidecars(Mapping[str, KVSidecar]):
    """Clients by the name of their endpoint; opened when first needed, closed when no endpoint has their address."""

    def __init__(
        self,
        endpoints: WatchedEndpoints,
        connect: Callable[[str], SidecarClient],
        *,
        clock: Clock,
        metrics: Metrics,
        interval_s: float = 5.0,
        timeout_s: float = 1.0,
    ) -> None:
        """`connect` makes a client of a gRPC address, without waiting."""
        self._endpoints = endpoints
        self._connect = connect
        self._clock = clock
        self._metrics = metrics
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._clients: dict[str, SidecarClient] = {}

    @override
    def __getitem__(self, name: str) -> KVSidecar:
        endpoint = self._endpoints.endpoint(name)
        if endpoint is None or not endpoint.sidecar:
            raise KeyError(name)
        return self._client(endpoint.sidecar)

    @override
    def __iter__(self) -> Iterator[str]:
        return (state.endpoint.name for state in self._endpoints.states() if state.endpoint.sidecar)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)

    async def run(self) -> None:
        """Ask all sidecars again and again until cancelled."""
        while True:
            try:
                await self.ask_all()
            except Exception:
                # The loop must live: without it connections to pods long gone would stay.
                self._metrics.probe_failures.inc()
                log.exception("sidecar poll failed")
            await asyncio.sleep(self._interval_s)

    async def ask_all(self) -> None:
        """Ask every sidecar once, all at the same time, and close what is no longer needed."""
        listed = {state.endpoint.name: state.endpoint.sidecar for state in self._endpoints.states()}
        asked = (self._ask(name, address) for name, address in listed.items() if address)
        found = await asyncio.gather(*asked, return_exceptions=True)
        kept = {state.endpoint.sidecar for state in self._endpoints.states()}
        gone = [self._clients.pop(address) for address in list(self._clients) if address not in kept]
        await asyncio.gather(*map(self._close_one, gone))
        for fault in found:
            if fault is not None:
                raise fault

    async def close(self) -> None:
        """Close every connection."""
        clients = list(self._clients.values())
        self._clients.clear()
        await asyncio.gather(*map(self._close_one, clients))

    async def _ask(self, name: str, address: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                after = self._endpoints.beginnings_end(name)
                stats = await self._client(address).stats(beginnings_after=after)
        except (ContextCacheError, TimeoutError):
            self._endpoints.note_sidecar(name, fingerprint="", tiers={})
            return
        tiers = {
            _TIERS[found.tier]: found.size_bytes / found.limit_bytes if found.limit_bytes else 0.0
            for found in stats.tiers
            if found.tier in _TIERS
        }
        self._endpoints.note_sidecar(name, fingerprint=",".join(stats.fingerprints), tiers=tiers)
        now_ms = self._clock.now_ms()
        ages_ms = stats.beginnings_age_ms or [0] * len(stats.beginnings)
        heard = {beginning: now_ms - age for beginning, age in zip(stats.beginnings, ages_ms, strict=False)}
        self._endpoints.note_beginnings(name, heard, stats.beginnings_end)

    async def _close_one(self, client: SidecarClient) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await client.close()
        except TimeoutError:
            log.warning("sidecar connection did not close in time")

    def _client(self, address: str) -> SidecarClient:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = self._connect(address)
        return client


class Holders:
    """All sidecars by the name of their endpoint."""

    def __init__(  # noqa: PLR0913  # one place is told everything, by name
        self,
        sidecars: Mapping[str, KVSidecar],
        endpoints: WatchedEndpoints,
        directory: SessionDirectory,
        *,
        clock: Clock,
        metrics: Metrics,
        read_timeout_s: float = 0.5,
        delete_timeout_s: float = 5.0,
        pull_timeout_s: float = 0.2,
        fork_timeout_s: float = 2.0,
    ) -> None:
        self._sidecars = sidecars
        self._endpoints = endpoints
        self._directory = directory
        self._pull_timeout_s = pull_timeout_s
        self._fork_timeout_s = fork_timeout_s
        self._clock = clock
        self._metrics = metrics
        self._read_timeout_s = read_timeout_s
        self._delete_timeout_s = delete_timeout_s

    async def kv_state(self, session: CacheSessionMetadata) -> KVState:
        """Return what the holder's sidecar has of the newest generation. Never raises for a sidecar."""
        if not session.cache_ref:
            return KVState("pending" if session.state is SessionState.CREATING else "absent")
        sidecar = self._sidecars.get(session.holder)
        if sidecar is None:
            return KVState("unreachable", size_bytes=None)
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await self._sealed_state(sidecar, session)
        except (ContextCacheError, TimeoutError):
            return KVState("unreachable", size_bytes=None)

    async def kept(self, tenant: TenantId, group: SessionId = "") -> tuple[dict[str, list[KeptGroup]], list[str]]:
        """Return the KV of a tenant's plain requests by pod, and the pods that did not say. Never raises."""
        names = list(self._sidecars)
        answers = await asyncio.gather(*(self._kept_at(name, tenant, group) for name in names))
        found = {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}
        return found, [name for name in names if name not in found]

    async def delete_kept(self, tenant: TenantId, group: SessionId) -> list[str]:
        """Delete one conversation's KV at every pod; return the pods that could not be reached."""
        names = list(self._sidecars)
        freed = await asyncio.gather(*(self._delete_at(name, tenant, group) for name in names))
        self._metrics.freed_bytes.inc(sum(count or 0 for count in freed))
        return [name for name, count in zip(names, freed, strict=True) if count is None]

    async def _kept_at(self, name: str, tenant: TenantId, group: SessionId) -> list[KeptGroup] | None:
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await self._sidecars[name].list_kept(tenant, group)
        except (ContextCacheError, TimeoutError):
            return None

    async def start_pull(self, session: CacheSessionMetadata, *, to: Endpoint) -> None:
        """Tell the sidecar of the pod that runs the next turn to fetch the KV from the holder's. Never raises.

        The session's row knows of the pod before any KV is there, so that a delete knows whom to ask. Returns once the
        pull is accepted, so that the pod, asked a moment later, knows that bytes are coming.
        """
        holder = self._endpoints.endpoint(session.holder)
        sidecar = self._sidecars.get(to.name)
        if sidecar is None or not session.cache_refs:
            return
        try:
            async with asyncio.timeout(self._pull_timeout_s):
                if session.holders is not None and to.name not in session.holders:
                    await self._directory.note_holder(session.tenant, session.session_id, holder=to.name)
                if holder is None or not holder.sidecar:
                    return
                outcome = await sidecar.pull_context(session.tenant, session.cache_refs, peer=holder.sidecar)
        except (ContextCacheError, TimeoutError):
            outcome = "unreachable"
        self._metrics.pulls.labels(outcome).inc()

    async def delete(self, session: CacheSessionMetadata) -> None:
        """Delete a context's KV at every sidecar that may have some: more than its holder may have seen its turns."""
        asked = (
            self._delete_at(name, session.tenant, session.session_id, session.cache_refs)
            for name in self._may_have(session)
        )
        freed_bytes = sum([freed or 0 for freed in await asyncio.gather(*asked)])
        self._metrics.freed_bytes.inc(freed_bytes)
        log.info("context deleted", extra={"session_id": session.session_id, "freed_bytes": freed_bytes})

    async def touch(self, session: CacheSessionMetadata) -> None:
        """Have every sidecar that may have KV of a context keep it as long as the context lives. Never raises."""
        await asyncio.gather(*(self._touch_at(name, session) for name in self._may_have(session)))

    async def fork(
        self, session: CacheSessionMetadata, child: CacheSessionMetadata, cache_ref: CacheRef
    ) -> ForkedKV | None:
        """Have the holder's sidecar give `child` the KV of `session`, under a name; return it, None where it did not.

        Of KV of more turns than the child has, the beginning serves it. Never raises.
        """
        sidecar = self._sidecars.get(session.holder)
        if sidecar is None or not session.cache_refs:
            return None
        try:
            async with asyncio.timeout(self._fork_timeout_s):
                return await sidecar.fork_context(
                    session.tenant,
                    session.cache_refs,
                    session_id=child.session_id,
                    cache_ref=cache_ref,
                    expires_at_ms=child.expires_at_ms,
                )
        except (ContextCacheError, TimeoutError) as exc:
            fields = {"session_id": child.session_id, "endpoint": session.holder, "error": type(exc).__name__}
            log.warning("fork starts without KV", extra=fields)
            return None

    def _may_have(self, session: CacheSessionMetadata) -> list[str]:
        """Return the sidecars to ask. All, where the row does not know, and where it knows no name that is listed.

        A create still under way has no holder yet; pods that go by other names here than in their own settings have
        none that is listed.
        """
        known = [name for name in session.holders or () if name in self._sidecars]
        return known or list(self._sidecars)

    async def _touch_at(self, name: str, session: CacheSessionMetadata) -> None:
        try:
            async with asyncio.timeout(self._read_timeout_s):
                await self._sidecars[name].touch_context(session.tenant, session.session_id, session.expires_at_ms)
        except (ContextCacheError, TimeoutError) as exc:
            fields = {"session_id": session.session_id, "endpoint": name, "error": type(exc).__name__}
            log.warning("KV lifetime not extended", extra=fields)

    async def _sealed_state(self, sidecar: KVSidecar, session: CacheSessionMetadata) -> KVState:
        is_coming, reason = False, ""
        try:
            found = await _manifest_state(sidecar, session, session.cache_ref)
        except CacheRefPending:
            is_coming = True
        else:
            if found is not None:
                return found
            reason = (await sidecar.wait_sealed(session.tenant, session.cache_ref, timeout_ms=0)).reason
        # A turn just committed may still be sealing; until then the generation before it is what there is.
        previous = session.previous_cache_ref
        try:
            kept = await _manifest_state(sidecar, session, previous) if previous else None
        except CacheRefPending:
            kept = None
        if reason:
            return KVState("absent", kept.size_bytes if kept else 0, kept.tier if kept else "", reason)
        if kept is not None:
            return KVState("pending", kept.size_bytes, kept.tier)
        is_young = self._clock.now_ms() - session.created_at_ms < _SEALING_MS
        return KVState("pending" if is_coming or is_young else "absent")

    async def _delete_at(
        self, name: str, tenant: TenantId, session_id: SessionId, cache_refs: Sequence[CacheRef] = ()
    ) -> int | None:
        """Return the bytes that were freed; None: the sidecar cannot be reached, its TTL will."""
        try:
            async with asyncio.timeout(self._delete_timeout_s):
                return await self._sidecars[name].delete_context(tenant, session_id=session_id, cache_refs=cache_refs)
        except (ContextCacheError, TimeoutError) as exc:
            self._metrics.unreachable_deletes.labels(name).inc()
            log.warning(
                "KV not deleted, expires at its TTL",
                extra={"session_id": session_id, "endpoint": name, "error": type(exc).__name__},
            )
            return None


async def _manifest_state(sidecar: KVSidecar, session: CacheSessionMetadata, cache_ref: CacheRef) -> KVState | None:
    try:
        manifest, tier = await sidecar.get_manifest(session.tenant, cache_ref)
    except CacheRefPending:
        raise
    except CacheRefNotFound:
        return None
    return sealed_state(manifest.size_bytes, tier)


def sealed_state(size_bytes: int, tier: str) -> KVState:
    """Return the state of KV that a sidecar has."""
    return KVState("sealed", size_bytes, "" if tier == _NO_TIER else tier)
