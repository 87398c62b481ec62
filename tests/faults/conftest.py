"""What these tests break: one stack over a tiny model, and processes around a toy engine. Both take long to start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.kit.faults.races_world import World as Toys
from tests.kit.faults.whole_world import WholeWorld, whole_world
from tests.kit.seed import SEED

_PATIENCE = {
    "MANAGER_REDIS_TIMEOUT_S": "5",
    "GATEWAY_MANAGER_TIMEOUT_S": "6",
    "GATEWAY_PROBE_TIMEOUT_S": "5",
    "TURN_RPC_DEADLINE_MS": "6000",
}
"""Beside other tests a part stands still for seconds; what breaks costs less than BOUND_S all the same."""
_CONNECTOR = {"deadline_factor": 3}


@pytest.fixture(scope="session")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeWorld]:
    # A memory tier of 1 000 tokens, so that what is restored comes from there and from disk.
    env = _PATIENCE | {"SIDECAR_MEMORY_LIMIT_BYTES": str(1 << 20)}
    with whole_world(tmp_path_factory.mktemp("world"), seed=SEED, env=env, connector=_CONNECTOR) as world:
        yield world


@pytest.fixture
def world(_world: WholeWorld) -> Iterator[WholeWorld]:
    """The stack, whole before and after. Who ends its engine comes last: test_vllm_ends.py."""
    _world.mend()
    yield _world
    _world.mend()


@pytest.fixture(scope="session")
def _toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    world = Toys(tmp_path_factory.mktemp("toys"), with_gateways=True)
    try:
        world.start()
        yield world
    finally:
        world.stop()


@pytest.fixture
def toys(_toys: Toys) -> Iterator[Toys]:
    """Two gateways, two managers and two pods whose engine is a toy; each runs before and after."""
    _toys.mend()
    yield _toys
    _toys.mend()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """Calls on connections of their own."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), connector=connector) as session:
        yield session
