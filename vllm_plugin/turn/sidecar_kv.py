"""The kv-sidecar as the turn's store of KV: signed orders, load reports, deletes. No decision about a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from contextcache.errors import ContextCacheError
from contextcache.identity import KV_TRANSFER_KEY, KVTransfer, cache_salt, sign_kv_transfer
from contextcache.model import CacheRef, CacheSessionMetadata, LoadedKV, SaveOutcome, TenantId, TtlPolicy
from kv_sidecar.client import KVSidecarClient

_EXPECTED_WAIT_MS = 1000
"""Wait of a question that is asked before the engine has loaded; longer than a sidecar lets a caller wait."""
LAST_WORD_MS = 500
"""Least wait for a report at an answer's end. Without it, loaded tokens would count as the engine's own."""
EXPECTED_MAX = 32
"""Questions at one time that wait for a load. A sidecar serves its engine's calls beside them, 256 in all."""


class SidecarKV:
    """See ports.KVStore. One per API server process."""

    def __init__(self, client: KVSidecarClient, *, secret: bytes, report_deadline_ms: int) -> None:
        """`report_deadline_ms`: wait for a report before an answer has ended. The client is closed with this object."""
        self._client = client
        self._secret = secret
        self.report_deadline_ms = report_deadline_ms
        self._expected: dict[str, asyncio.Task[LoadedKV | None]] = {}
        self._is_silent = False
        """The last wait at an answer's end was in vain: until a report comes, waits are short."""

    async def start(self) -> None:
        """See ports.KVStore."""

    def order(
        self,
        session: CacheSessionMetadata,
        order: KVTransfer,
        token_ids: Sequence[int],  # noqa: ARG002  # the port's
    ) -> tuple[dict[str, Any], str]:
        """See ports.KVStore."""
        salt = cache_salt(session.tenant, session.model_id, self._secret)
        return {KV_TRANSFER_KEY: sign_kv_transfer(order, self._secret)}, salt

    def expect_load(self, request_id: str) -> None:
        """See ports.KVStore. The report is then here at the first token, when every core computes."""
        if sum(not asked.done() for asked in self._expected.values()) < EXPECTED_MAX:
            self._expected[request_id] = asyncio.create_task(self._ask(request_id, _EXPECTED_WAIT_MS))

    async def loaded(self, request_id: str, told: Mapping[str, Any], *, is_whole: bool) -> LoadedKV | None:  # noqa: ARG002  # the port's
        """See ports.KVStore."""
        deadline_ms = self.report_deadline_ms
        if is_whole and not self._is_silent:
            deadline_ms = max(deadline_ms, LAST_WORD_MS)
        asked, found = self._expected.get(request_id), None
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_ms / 1000):
                found = await asked if asked is not None else None
                if found is None:
                    found = await self._ask(request_id, deadline_ms)
        self._expected.pop(request_id, None)
        self._is_silent = found is None and (self._is_silent or is_whole)
        return found

    async def forget_load(self, request_id: str) -> None:
        """See ports.KVStore."""
        if (asked := self._expected.pop(request_id, None)) is not None:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def read_ahead(self, session: CacheSessionMetadata, token_ids: Sequence[int]) -> None:  # noqa: ARG002  # the port's
        """See ports.KVStore."""
        await self._client.read_ahead(session.tenant, session.cache_refs)

    async def wait_sealed(
        self, tenant: TenantId, cache_ref: CacheRef, *, timeout_ms: int, placements: Sequence[str] = ()
    ) -> SaveOutcome:
        """See ports.KVStore."""
        return await self._client.wait_sealed(tenant, cache_ref, timeout_ms=timeout_ms, placements=placements)

    async def committed(
        self,
        before: CacheSessionMetadata,
        after: CacheSessionMetadata,
        ids: Sequence[Sequence[int]],  # noqa: ARG002  # the port's
    ) -> None:
        """See ports.KVStore: delete the KV of two generations ago, and move an expiry that has changed."""
        tenant, was_patched = before.tenant, after.expires_at_ms != before.expires_at_ms
        calls = []
        if before.previous_cache_ref:
            calls.append(self._client.delete_context(tenant, cache_refs=(before.previous_cache_ref,), replaced=True))
        if was_patched or after.ttl_policy is TtlPolicy.SLIDING:
            calls.append(self._client.touch_context(tenant, before.session_id, after.expires_at_ms))
        await asyncio.gather(*calls)

    async def interrupt(self, tenant: TenantId, save: CacheRef) -> None:
        """See ports.KVStore."""
        await self._client.interrupt_save(tenant, save)

    async def drop(self, tenant: TenantId, save: CacheRef) -> None:
        """See ports.KVStore."""
        await self._client.delete_context(tenant, cache_refs=(save,))

    async def close(self) -> None:
        """See ports.KVStore."""
        await self._client.close()

    async def _ask(self, request_id: str, timeout_ms: int) -> LoadedKV | None:
        with suppress(ContextCacheError):
            return await self._client.load_report(request_id, timeout_ms=timeout_ms)
        return None
