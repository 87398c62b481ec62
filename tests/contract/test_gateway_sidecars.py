"""The gateway's fake sidecar and the real one, over real gRPC, keep one contract."""

from __future__ import annotations

import pytest

from contextcache.names import new_cache_ref
from kv_sidecar.client import KVSidecarClient
from kv_sidecar.server import serve
from tests.contract.gateway_sidecar_contract import GatewaySidecarContract
from tests.kit.gateway_parts import manifest_of
from tests.kit.kv_blocks import SidecarUnderTest
from tests.kit.memory_sidecar import MemorySidecar


class TestMemorySidecar(GatewaySidecarContract):
    @pytest.fixture
    def sidecar(self):
        return MemorySidecar()

    @pytest.fixture
    def keep(self, sidecar):
        async def keep(session_id, tenant):
            ref = new_cache_ref()
            sidecar.keep(manifest_of(session_id, tenant=tenant, cache_ref=ref))
            return ref

        return keep

    @pytest.fixture
    def take_down(self, sidecar):
        async def take_down():
            sidecar.down = True

        return take_down


class TestSidecarOverGrpc(GatewaySidecarContract):
    @pytest.fixture
    async def under_test(self, tmp_path):
        async with SidecarUnderTest(tmp_path) as under_test:
            yield under_test

    @pytest.fixture
    async def server(self, under_test, tmp_path):
        server = serve(under_test.sidecar, [f"unix://{tmp_path}/sidecar.sock"])
        await server.start()
        yield server
        await server.stop(0)

    @pytest.fixture
    async def sidecar(self, server, tmp_path):
        client = KVSidecarClient(f"unix://{tmp_path}/sidecar.sock", timeout_s=30)
        yield client
        await client.close()

    @pytest.fixture
    def keep(self, under_test):
        async def keep(session_id, tenant):
            # Contexts that share no block, so that each one's bytes are its own.
            first = len(under_test.block_files())
            save = await under_test.save(tuple(range(first, first + 300)), session_id=session_id, tenant=tenant)
            return save.cache_ref

        return keep

    @pytest.fixture
    def take_down(self, server):
        async def take_down():
            await server.stop(0)

        return take_down
