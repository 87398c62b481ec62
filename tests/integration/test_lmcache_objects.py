"""What LMCache's second tier keeps in a real sidecar, without LMCache: its own interface is in tests/vllm."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from contextcache.errors import CacheRefNotFound, ContextDeleted, CorruptBlock, SidecarUnavailable
from integrations.lmcache.objects import ObjectAddress, SidecarObjects
from kv_sidecar.client import EngineSidecarClient
from kv_sidecar.format.ids import BlockKey
from tests.kit.sidecar_process import SidecarProcess

SIZE_BYTES = (1 << 20) + 7
"""More than one frame."""


@dataclass(frozen=True)
class Name:
    chunk_hash: bytes
    model_name: str = "m/odel"
    kv_rank: int = 1
    object_group_id: int = 2
    cache_salt: str = "salt"


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    process = SidecarProcess(tmp_path_factory.mktemp("objects"))
    process.start()
    yield process
    process.kill()


@pytest.fixture
def objects(sidecar: SidecarProcess) -> Iterator[SidecarObjects]:
    objects = SidecarObjects(sidecar.address)
    yield objects
    objects.close()


@pytest.fixture
def name() -> Name:
    return Name(random.randbytes(32))


def test_an_object_comes_back_as_it_was_until_it_is_deleted(objects, sidecar, name):
    data, room = random.randbytes(SIZE_BYTES), bytearray(SIZE_BYTES)
    assert not objects.has(name)

    assert objects.put(name, memoryview(data)) == SIZE_BYTES
    assert objects.has(name)
    objects.get(name, memoryview(room))
    assert room == data

    assert objects.delete(name) > SIZE_BYTES
    assert not objects.has(name)
    assert sidecar.block_files() == []
    with pytest.raises(CacheRefNotFound):
        objects.get(name, memoryview(room))
    with pytest.raises(ContextDeleted):
        objects.put(name, memoryview(data))
    assert objects.delete(name) == 0


def test_an_object_is_of_its_tenant_and_not_the_engine_s(objects, sidecar, name):
    objects.put(name, memoryview(b"x" * 100))
    other = EngineSidecarClient(sidecar.address)
    try:
        with pytest.raises(CacheRefNotFound):
            other.get_manifest("demo", ObjectAddress.of(name).cache_ref, 5)
    finally:
        other.close()
    objects.delete(name)


def test_a_room_of_another_size_is_left_as_it_was(objects, name):
    objects.put(name, memoryview(b"x" * 100))
    room = bytearray(99)

    with pytest.raises(CorruptBlock, match="size"):
        objects.get(name, memoryview(room))

    assert room == bytes(99)
    objects.delete(name)


@pytest.mark.parametrize(
    "change",
    [{"chunk_hash": b"1"}, {"model_name": "n"}, {"kv_rank": 3}, {"object_group_id": 0}, {"cache_salt": ""}],
    ids=lambda change: next(iter(change)),
)
def test_every_part_of_a_name_makes_another_object(name, change):
    one, other = ObjectAddress.of(name), ObjectAddress.of(replace(name, **change))

    assert len({one.cache_ref, other.cache_ref}) == len({one.token_ids, other.token_ids}) == 2
    assert BlockKey.from_file_name(BlockKey("tail", one.cache_ref, 0).file_name) is not None


def test_a_sidecar_that_is_away_is_said(tmp_path, name):
    objects = SidecarObjects(f"unix://{tmp_path}/nobody.sock", timeout_ms=500)
    try:
        with pytest.raises(SidecarUnavailable):
            objects.has(name)
    finally:
        objects.close()
