"""The pods' kv-sidecars: their clients, the KV of a context, and its deletion. Knows no wire.

No answer needs a sidecar. If one fails, the caller reports it, and the sidecar expires the KV by its TTL.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from contextcache.clock import Clock
from contextcache.errors import CacheRefNotFound, CacheRefPending, ContextCacheError
from contextcache.model import (
    NO_PROMISE,
    CacheRef,
    CacheSessionMetadata,
    ForkedKV,
    KeptGroup,
    Placement,
    Promise,
    SessionId,
    SessionState,
    TenantId,
)
from contextcache.v1 import kv_sidecar_pb2 as pb
from gateway.metrics import Metrics
from gateway.pods.endpoints import WatchedEndpoints, repeat
from gateway.pods.state import Endpoint, EndpointState
from gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from context_manager.client import ContextManagerClient
    from kv_sidecar.client import KVSidecarClient

log = logging.getLogger(__name__)

_SEALING_MS = 30_000
"""Age of a context, in ms, from which KV that is not sealed counts as absent, not pending."""
_FORK_S = 2.0
"""Seconds that a fork waits for the holder's sidecar. It links files and copies none."""
_PROBES_PER_POLL = 5
"""Probes of the pods per poll of the sidecars: a sidecar's facts change only with its engine."""
_NO_TIER = "none"
"""Tier in the answer of a sidecar that does not know it."""
_TIERS = {number: name.removeprefix("TIER_").lower() for name, number in pb.Tier.items()}

HolderState = Literal["sealed", "pending", "absent", "unreachable"]
Answer = TypeVar("Answer")
Call: TypeAlias = "Callable[[KVSidecarClient], Awaitable[Answer]]"


@dataclass(frozen=True, slots=True)
class KVState:
    """State of a context's KV at its holder."""

    state: HolderState
    size_bytes: int | None = 0
    """Bytes of the sealed KV, shared blocks included; None: unknown."""
    tier: str = ""
    reason: str = ""
    """Reason for missing KV of the newest generation, a short fixed phrase; empty: it exists, or the reason is
    unknown."""


_UNREACHABLE = KVState("unreachable", size_bytes=None)


@dataclass(eq=False)
class Holders:
    """Clients of the pods' sidecars, opened at their first call and closed when no pod has their address.

    `run` polls the sidecars. The other calls concern the KV of a context or of a kept conversation. No call raises for
    a fault of a sidecar.
    """

    endpoints: WatchedEndpoints
    manager: ContextManagerClient
    connect: Callable[[str], KVSidecarClient]
    """Makes a client of a gRPC address, without waiting."""
    _: KW_ONLY
    clock: Clock
    metrics: Metrics
    settings: GatewaySettings
    _clients: dict[str, KVSidecarClient] = field(default_factory=dict, init=False)
    """By address."""

    def names(self) -> list[str]:
        """Return the pods that have a sidecar."""
        return [state.endpoint.name for state in self.endpoints.states() if state.endpoint.sidecar]

    async def run(self) -> None:
        """Poll all sidecars until cancelled, once per `_PROBES_PER_POLL` probes of the pods."""
        # The loop must survive: only it closes connections to pods that are gone.
        interval_s = _PROBES_PER_POLL * self.settings.probe_interval_s
        await repeat(self.ask_all, interval_s, "sidecar poll failed", self.metrics)

    async def ask_all(self) -> None:
        """Poll every sidecar once, concurrently, and close the clients of pods that are gone."""
        states = [state for state in self.endpoints.states() if state.endpoint.sidecar]
        found = await asyncio.gather(*map(self._ask, states), return_exceptions=True)
        kept = {state.endpoint.sidecar for state in self.endpoints.states()}
        await self._close([address for address in self._clients if address not in kept])
        for fault in found:
            if fault is not None:
                raise fault

    async def close(self) -> None:
        """Close every connection."""
        await self._close(list(self._clients))

    async def kv_state(self, session: CacheSessionMetadata) -> KVState:
        """Return the state of the newest generation's KV at the holder."""
        if not session.cache_ref:
            return KVState("pending" if session.state is SessionState.CREATING else "absent")
        found = await self._asked(
            session.holder, lambda client: self._sealed_state(client, session), self.settings.sidecar_timeout_s
        )
        return found or _UNREACHABLE

    async def kept(self, tenant: TenantId, group: SessionId = "") -> tuple[dict[str, list[KeptGroup]], list[str]]:
        """Return the KV of a tenant's plain requests by pod, and the pods that did not answer."""
        return await self._asked_all(
            self.names(), lambda client: client.list_kept(tenant, group), self.settings.sidecar_timeout_s
        )

    async def delete_kept(self, tenant: TenantId, group: SessionId) -> list[str]:
        """Delete one conversation's KV at every pod; return the pods that did not answer."""
        _, unreachable = await self._delete(self.names(), tenant, group)
        return unreachable

    async def start_pull(self, session: CacheSessionMetadata, *, to: Endpoint) -> None:
        """Tell the sidecar of the pod that runs the next turn to pull the KV from the holder's.

        The session's row lists the pod before any KV is there, so that a delete reaches it. Returns once the sidecar
        has accepted the pull: the engine then knows that bytes are coming.
        """
        holder = self.endpoints.endpoint(session.holder)
        if not to.sidecar or not session.cache_refs:
            return

        async def pulled(client: KVSidecarClient) -> str | None:
            if session.holders is not None and to.name not in session.holders:
                await self.manager.note_holder(session.tenant, session.session_id, holder=to.name)
            if holder is None or not holder.sidecar:
                return ""  # no pod to pull from
            return await client.pull_context(session.tenant, session.cache_refs, peer=holder.sidecar)

        outcome = await self._asked(to.name, pulled, self.settings.pull_timeout_s)
        if outcome != "":
            self.metrics.pulls.labels(outcome or "unreachable").inc()

    async def delete(self, session: CacheSessionMetadata) -> None:
        """Delete a context's KV at every sidecar that may have some: its turns may have run on several pods."""
        freed_bytes, _ = await self._delete(
            self._may_have(session), session.tenant, session.session_id, session.cache_refs
        )
        log.info("context deleted", extra={"session_id": session.session_id, "freed_bytes": freed_bytes})

    async def touch(self, session: CacheSessionMetadata) -> None:
        """Give a context's KV the expiry of the context, at every sidecar that may have some."""
        await self._asked_all(
            self._may_have(session),
            lambda client: client.touch_context(session.tenant, session.session_id, session.expires_at_ms),
            self.settings.sidecar_timeout_s,
            "KV lifetime not extended",
            session_id=session.session_id,
        )

    async def retain(self, session: CacheSessionMetadata, *, retain_ms: int, pinned: bool) -> Promise:
        """Ask the holder for a minimum lifetime of a context's KV. No answer is a denial: `unavailable`."""
        if not session.cache_refs:
            return NO_PROMISE
        promise = await self._asked(
            session.holder,
            lambda client: client.retain_context(
                session.tenant, session.cache_refs, retain_ms=retain_ms, pinned=pinned
            ),
            self.settings.sidecar_timeout_s,
        )
        return promise or Promise(reason="unavailable")

    async def place(self, session: CacheSessionMetadata, placements: Sequence[str]) -> tuple[Placement, ...]:
        """Have the holder carry out placements of a context's newest KV; return the answers.

        Half of the call's time is left for a seal. No answer is a denial: `unavailable`.
        """
        if not session.cache_ref:
            return ()
        within_s = self.settings.sidecar_timeout_s
        outcome = await self._asked(
            session.holder,
            lambda client: client.wait_sealed(
                session.tenant, session.cache_ref, timeout_ms=round(500 * within_s), placements=placements
            ),
            within_s,
        )
        return outcome.placements if outcome else (Placement(reason="unavailable"),) * len(placements)

    async def fork(
        self, session: CacheSessionMetadata, child: CacheSessionMetadata, cache_ref: CacheRef
    ) -> ForkedKV | None:
        """Give `child` the KV of `session` at its holder, as `cache_ref`; None: it starts without KV.

        KV of more turns than the child has serves it too, by its beginning.
        """
        if not session.cache_refs:
            return None
        return await self._asked(
            session.holder,
            lambda client: client.fork_context(
                session.tenant,
                session.cache_refs,
                session_id=child.session_id,
                cache_ref=cache_ref,
                expires_at_ms=child.expires_at_ms,
            ),
            _FORK_S,
            "fork starts without KV",
            session_id=child.session_id,
        )

    async def _ask(self, pod: EndpointState) -> None:
        name, after = pod.endpoint.name, pod.beginnings_end
        stats = await self._asked(
            name, lambda client: client.stats(beginnings_after=after), self.settings.probe_timeout_s
        )
        if stats is None:
            self.endpoints.note_sidecar(name, fingerprint="", tiers={})
            return
        tiers = {
            _TIERS[found.tier]: found.size_bytes / found.limit_bytes if found.limit_bytes else 0.0
            for found in stats.tiers
            if found.tier in _TIERS
        }
        self.endpoints.note_sidecar(name, fingerprint=",".join(stats.fingerprints), tiers=tiers)
        now_ms = self.clock.now_ms()
        heard = {
            beginning: now_ms - age_ms
            for beginning, age_ms in zip(stats.beginnings, stats.beginnings_age_ms, strict=False)
        }
        self.endpoints.note_beginnings(name, heard, stats.beginnings_end)

    async def _close(self, addresses: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(self.settings.probe_timeout_s):
                await asyncio.gather(*[self._clients.pop(address).close() for address in addresses])
        except TimeoutError:
            log.warning("sidecar connection did not close in time")

    def _client(self, address: str) -> KVSidecarClient:
        if address not in self._clients:
            self._clients[address] = self.connect(address)
        return self._clients[address]

    async def _asked(
        self, name: str, call: Call[Answer], within_s: float, failure: str = "", **fields: str
    ) -> Answer | None:
        """Return the answer of a pod's sidecar; None: the pod has none, or the call failed or took too long.

        `failure`: warning for the latter case, logged with `fields`.
        """
        endpoint = self.endpoints.endpoint(name)
        if endpoint is None or not endpoint.sidecar:
            return None
        try:
            async with asyncio.timeout(within_s):
                return await call(self._client(endpoint.sidecar))
        except (ContextCacheError, TimeoutError) as exc:
            if failure:
                log.warning(failure, extra={"endpoint": name, "error": type(exc).__name__, **fields})
            return None

    async def _asked_all(
        self, names: Sequence[str], call: Call[Answer], within_s: float, failure: str = "", **fields: str
    ) -> tuple[dict[str, Answer], list[str]]:
        """Return the answers of several sidecars by pod, and the pods without one; see `_asked`."""
        answers = await asyncio.gather(*(self._asked(name, call, within_s, failure, **fields) for name in names))
        found = {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}
        return found, [name for name in names if name not in found]

    def _may_have(self, session: CacheSessionMetadata) -> list[str]:
        """Return the sidecars that may have KV of a context: all of them, if the row names none that is listed.

        A create in progress has no holder yet. Pods may have other names here than in their own settings.
        """
        names = self.names()
        return [name for name in session.holders or () if name in names] or names

    async def _sealed_state(self, client: KVSidecarClient, session: CacheSessionMetadata) -> KVState:
        newest = await _state_of(client, session.tenant, session.cache_ref)
        if newest is not None and newest.state == "sealed":
            return newest
        reason = ""
        if newest is None:
            reason = (await client.wait_sealed(session.tenant, session.cache_ref, timeout_ms=0)).reason
        # A turn just committed may still be sealing. Until then only the generation before it has KV.
        previous = await _state_of(client, session.tenant, session.previous_cache_ref)
        if reason:
            return replace(previous or KVState("absent"), state="absent", reason=reason)
        if previous is not None and previous.state == "sealed":
            return replace(previous, state="pending")
        is_young = self.clock.now_ms() - session.created_at_ms < _SEALING_MS
        return KVState("absent" if newest is None and not is_young else "pending")

    async def _delete(
        self, names: Sequence[str], tenant: TenantId, session_id: SessionId, cache_refs: Sequence[CacheRef] = ()
    ) -> tuple[int, list[str]]:
        """Return the freed bytes, and the pods that did not answer: their KV expires at its TTL."""
        freed, unreachable = await self._asked_all(
            names,
            lambda client: client.delete_context(tenant, session_id=session_id, cache_refs=cache_refs),
            self.settings.delete_timeout_s,
            "KV not deleted, expires at its TTL",
            session_id=session_id,
        )
        for name in unreachable:
            self.metrics.unreachable_deletes.labels(name).inc()
        freed_bytes = sum(freed.values())
        self.metrics.freed_bytes.inc(freed_bytes)
        return freed_bytes, unreachable


async def _state_of(client: KVSidecarClient, tenant: TenantId, cache_ref: CacheRef) -> KVState | None:
    """Return the state of the KV under a ref; None: there is none."""
    if not cache_ref:
        return None
    try:
        manifest, tier = await client.get_manifest(tenant, cache_ref)
    except CacheRefPending:
        return KVState("pending")
    except CacheRefNotFound:
        return None
    return sealed_state(manifest.size_bytes, tier)


def sealed_state(size_bytes: int, tier: str) -> KVState:
    """Return the state of sealed KV."""
    return KVState("sealed", size_bytes, "" if tier == _NO_TIER else tier)
