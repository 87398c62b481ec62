"""LMCache's second tier over a real kv-sidecar: the interface of the real wheel, and contexts that outlive both."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local.environments import LMCACHE, LMCACHE_BYTES, LMCACHE_NAME, made
from tests.kit.lmcache_l2 import Adapter, Key
from tests.kit.lmcache_world import CHUNK_TOKENS, LMCacheWorld
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.until import wait_until
from tests.kit.vllm_answers import prompt_ids
from tests.vllm.test_lmcache import Asker, new_prompt, same

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

SIZE_BYTES = 3 << 20
"""More than one frame."""


@pytest.fixture(scope="module")
def environment() -> Path:
    return made(LMCACHE_NAME, LMCACHE, needed_bytes=LMCACHE_BYTES)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    process = SidecarProcess(tmp_path, collect_interval_s=0.5, tenant_limit_bytes=4 * (SIZE_BYTES + 4096))
    process.start()
    yield process
    process.kill()


@pytest.fixture
def adapter(environment: Path, sidecar: SidecarProcess) -> Iterator[Adapter]:
    with Adapter(environment, sidecar=sidecar.address) as adapter:
        yield adapter


def new_key(salt: str = "") -> Key:
    return salt, random.randbytes(32).hex()


def new_object() -> str:
    return random.randbytes(SIZE_BYTES).decode("latin-1")


def test_what_is_stored_is_found_and_loaded_byte_for_byte(adapter):
    objects = {new_key("a"): new_object(), new_key("b"): new_object()}

    assert adapter.store(objects) == 2 * SIZE_BYTES
    assert adapter.lookup(*objects, new_key()) == [True, True, False]
    assert adapter.load(*objects, new_key(), size_bytes=SIZE_BYTES) == [*objects.values(), None]
    assert adapter.order("usage") == 2 * SIZE_BYTES


def test_each_part_of_a_key_counts(adapter):
    salt, digest = new_key("a")
    adapter.store({(salt, digest): new_object()})

    assert adapter.lookup((salt, digest), ("b", digest), ("", digest)) == [True, False, False]


def test_storing_again_is_no_failure_and_is_counted_once(adapter):
    key = new_key()
    text = new_object()

    assert [adapter.store({key: text}) for _ in range(2)] == [SIZE_BYTES] * 2
    assert adapter.order("usage") == SIZE_BYTES


def test_what_is_deleted_frees_every_byte_and_is_refused_when_it_comes_late(adapter, sidecar):
    gone, stays = new_key(), new_key()
    text = new_object()
    adapter.store({gone: text, stays: text})

    assert adapter.delete(gone, new_key()) == ""

    assert len(sidecar.block_files()) == 1
    assert adapter.lookup(gone, stays) == [False, True]
    assert adapter.store({gone: text}) == -1
    assert adapter.order("usage") == SIZE_BYTES


def test_the_tenants_quota_holds(adapter, sidecar):
    """What was used longest ago goes, or the new one is dropped: never more than the limit."""
    keys = [new_key() for _ in range(6)]
    for key in keys:
        adapter.store({key: new_object()})

    assert len(sidecar.block_files()) <= 4
    assert sum(adapter.lookup(*keys)) <= 4


def test_an_object_ends_by_its_time(environment, sidecar):
    with Adapter(environment, sidecar=sidecar.address, ttl_s=1) as adapter:
        key = new_key()
        adapter.store({key: new_object()})

        wait_until(lambda: not sidecar.block_files(), what="its bytes are freed")
        assert adapter.lookup(key) == [False]


def test_objects_outlive_the_sidecar_and_a_sidecar_that_is_away_is_a_miss(adapter, sidecar):
    key, text = new_key(), new_object()
    adapter.store({key: text})
    sidecar.kill()

    assert adapter.lookup(key) == [False]
    assert adapter.load(key, size_bytes=SIZE_BYTES) == [None]
    assert adapter.store({new_key(): text}) == -1
    assert adapter.delete(key) == "SidecarUnavailable"

    sidecar.start()
    wait_until(lambda: adapter.lookup(key) == [True], what="the adapter has found it again")
    assert adapter.load(key, size_bytes=SIZE_BYTES) == [text]


def test_an_object_with_a_flipped_byte_is_not_loaded(adapter, sidecar):
    key = new_key()
    adapter.store({key: new_object()})
    sidecar.kill()
    sidecar.flip_bytes(rewrite_checksum=False)
    sidecar.start()
    wait_until(lambda: adapter.lookup(key) == [True], what="the adapter has found it again")

    assert adapter.load(key, size_bytes=SIZE_BYTES) == [None]


def test_an_object_of_another_size_is_not_loaded(adapter):
    key = new_key()
    adapter.store({key: new_object()})

    assert adapter.load(key, size_bytes=SIZE_BYTES - 1) == [None]


def test_a_context_outlives_engine_lmcache_and_sidecar_and_leaves_no_byte(tmp_path):
    sidecar = SidecarProcess(tmp_path)
    sidecar.start()
    params = {"sidecar": sidecar.address}
    plugin = {"type": "plugin", "module_path": "integrations.lmcache.second_tier", "class_name": "SidecarL2Adapter"}
    try:
        with LMCacheWorld(tmp_path, l2={**plugin, "adapter_params": params}) as world:
            asker = Asker(world)
            create = asker.create(new_prompt())
            asker.wait_kept(create["session_id"], 3)
            assert len(sidecar.block_files()) == 3
            world.kill("engine")
            world.kill("turn")
            world.kill("lmcache")
            sidecar.kill()
            sidecar.start()
            world.start("lmcache")
            world.start("turn")
            world.start("engine")

            warm = asker.ask(create["session_id"], [5, 6, 7])

            assert warm["usage"]["context"]["cached_tokens"] == 3 * CHUNK_TOKENS
            same(warm, asker.plain(prompt_ids(warm), "cold"))
            asker.delete(create["session_id"])
            wait_until(lambda: not asker.stored(create["session_id"]), what="nothing is listed")
            wait_until(lambda: len(sidecar.block_files()) == 3, what="no more is left than the cold answer's")
            asker.close()
    finally:
        sidecar.kill()
