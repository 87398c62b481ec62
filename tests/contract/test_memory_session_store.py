"""The shipped MemorySessionStore keeps the contract."""

import pytest

from context_manager.memory_store import MemorySessionStore
from tests.contract.session_changes_contract import SessionChangesContract
from tests.contract.session_store_contract import KEY, NOW, TOMBSTONE_S
from tests.contract.usage_contract import UsageContract


class TestMemorySessionStore(SessionChangesContract, UsageContract):
    @pytest.fixture
    def store(self) -> MemorySessionStore:
        return MemorySessionStore(tombstone_s=TOMBSTONE_S)

    @pytest.fixture
    def limited(self) -> MemorySessionStore:
        return MemorySessionStore(tombstone_s=TOMBSTONE_S, tenant_contexts_max=self.CONTEXTS_MAX)

    @pytest.fixture
    def frugal(self) -> MemorySessionStore:
        return MemorySessionStore(tombstone_s=TOMBSTONE_S, tenant_bytes_max=self.TENANT_BYTES_MAX)

    async def lose_last_segment(self, store: MemorySessionStore) -> None:
        store._transcripts[KEY].pop()

    async def known_ms(self, store: MemorySessionStore, sender: str) -> int:
        return store._counted[KEY.tenant, sender][1] - NOW
