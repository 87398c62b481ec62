"""The fake of LMCache's HTTP API keeps the contract that the real one keeps in tests/vllm/test_lmcache.py."""

from __future__ import annotations

import pytest

from integrations.lmcache.api import LMCacheApi
from tests.contract.lmcache_contract import LMCacheContract
from tests.kit.lmcache_fake import COORDINATOR, SERVER, FakeLMCache


class TestFakeLMCache(LMCacheContract):
    @pytest.fixture
    def fake(self):
        return FakeLMCache()

    @pytest.fixture
    async def api(self, fake):
        api = LMCacheApi(
            server_url=SERVER,
            coordinator_url=COORDINATOR,
            model_name="m",
            world_size=1,
            timeout_s=30,
            transport=fake.transport(),
        )
        yield api
        await api.close()

    @pytest.fixture
    def store(self, fake):
        return lambda kv: fake.store(kv.salt, list(kv.token_ids))
