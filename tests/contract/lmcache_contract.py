"""What our driver relies on in LMCache's HTTP API; the fake keeps it, and the real one (tests/vllm/test_lmcache.py)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from integrations.lmcache.api import LMCacheApi, SaltedTokens
from tests.kit.until import until

CHUNKS = 2
STALE_S = 30
"""The directory hears of everything a moment later."""


def new_kv(salt: str) -> SaltedTokens:
    """Return tokens that nobody else has: whole chunks, and a tail that is none."""
    return SaltedTokens(salt, random.choices(range(1, 400), k=CHUNKS * 256 + 9))


class LMCacheContract:
    """Subclasses give `api`, and `store`, which has KV saved as the engine saves it."""

    @pytest.fixture
    async def stored(self, api: LMCacheApi, store: Callable[[SaltedTokens], None]) -> SaltedTokens:
        kv = new_kv(f"salt-{random.random()}")
        await until(lambda: self._saved(api, store, kv), what="the KV is listed", deadline_s=STALE_S)
        return kv

    async def _saved(self, api, store, kv):
        store(kv)
        return await api.size_bytes(kv)

    async def test_only_whole_chunks_are_prefetched(self, api, stored):
        assert await api.prefetch(stored) == CHUNKS
        assert await api.prefetch(SaltedTokens(stored.salt, stored.token_ids[:255])) == 0

    async def test_the_servers_are_known(self, api):
        assert [instance.instance_id for instance in await api.instances()] == ["node-0"]

    async def test_what_is_deleted_is_listed_no_more(self, api, stored):
        (instance,) = await api.instances()

        removed = await api.delete(instance, stored)

        assert removed == 0
        await until(lambda: _is_gone(api, stored), what="nothing is listed", deadline_s=STALE_S)

    async def test_nothing_is_deleted_under_another_salt(self, api, store, stored):
        (instance,) = await api.instances()
        await api.delete(instance, SaltedTokens("another", stored.token_ids))

        assert await api.size_bytes(stored) > 0

    async def test_two_pins_need_two_unpins_before_a_delete(self, api, stored):
        (instance,) = await api.instances()
        skipped = []
        for change in (api.pin, api.pin, api.unpin, api.unpin):
            await change(stored)
            skipped.append(await api.delete(instance, stored))

        assert skipped == [CHUNKS, CHUNKS, CHUNKS, 0]

    async def test_unpinning_what_has_no_pin_is_harmless(self, api, stored):
        await api.unpin(stored)
        await api.pin(stored)

        (instance,) = await api.instances()
        assert await api.delete(instance, stored) == CHUNKS
        await api.unpin(stored)

    async def test_keys_are_found_by_their_salt_and_deleted_by_name_pinned_or_not(self, api, stored):
        await api.pin(stored)
        (instance,) = await api.instances()
        keys = await api.keys_under(stored.salt)

        removed = await api.delete_keys(instance, keys)

        assert len(keys) == CHUNKS
        assert removed == 0
        await until(lambda: _is_gone(api, stored), what="nothing is listed", deadline_s=STALE_S)
        assert await api.keys_under(stored.salt) == []

    async def test_deleting_what_is_not_there_is_harmless(self, api):
        (instance,) = await api.instances()

        assert await api.delete(instance, new_kv("nobody")) == 0
        assert await api.keys_under("nobody") == []


async def _is_gone(api: LMCacheApi, kv: SaltedTokens) -> bool:
    return await api.size_bytes(kv) == 0
