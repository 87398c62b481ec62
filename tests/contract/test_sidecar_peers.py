"""The peer of the unit tests and the real one, over real gRPC, keep one contract."""

from __future__ import annotations

import asyncio

import pytest

from kv_sidecar.limits import Limits
from kv_sidecar.moving.peer import PeerSidecar
from kv_sidecar.server import serve
from tests.contract.sidecar_peer_contract import SidecarPeerContract
from tests.kit.catalog_peer import CatalogPeer
from tests.kit.kv_blocks import SidecarUnderTest


@pytest.fixture
async def there(tmp_path):
    async with SidecarUnderTest(tmp_path) as there:
        yield there


class TestCatalogPeer(SidecarPeerContract):
    @pytest.fixture
    def peer(self, there):
        return CatalogPeer(there)


class TestPeerOverGrpc(SidecarPeerContract):
    @pytest.fixture
    async def peer(self, there):
        server = serve(there.sidecar, ["127.0.0.1:0"])
        await server.start()
        address = f"127.0.0.1:{server.ports[0]}"
        peer = PeerSidecar(
            address,
            timeout_s=10,
            limits=Limits(block_tokens=1, pull_bytes_per_s_min=1 << 30, manifest_timeout_s=10),
            slots=asyncio.Semaphore(1),
        )
        yield peer
        await peer.close()
        await server.stop(1)
