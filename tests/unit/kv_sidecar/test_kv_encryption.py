"""KV encrypted in the shared store: what opens, for whom, under which name; keys that change; what a file may be."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from contextcache.errors import CacheRefNotFound, KeyNotAtHand
from contextcache.model import MAX_TTL_S
from contextcache.names import KEPT_PREFIX
from kv_sidecar.store.encryption import MAGIC, StoreKeys, key_id_of, opened
from tests.kit.kv_blocks import TENANT, brought
from tests.kit.shared_store import NamedRefs
from tests.kit.store_keys import write_store_keys

NAME = f"{TENANT}/blocks/x"
DATA = b"pages of a block" * 64
TEN = tuple(range(10))
HOUR_S = 3600


@pytest.fixture
def keys_of(tmp_path: Path) -> Callable[..., StoreKeys]:
    def made(**ids: list[str]) -> StoreKeys:
        return StoreKeys(write_store_keys(tmp_path / "keys", {"*" if it == "others" else it: ids[it] for it in ids}))

    return made


@pytest.fixture
def kv_settings() -> dict[str, object]:
    return {"store_grace_s": 60, "store_interval_s": 10}


def stored(tmp_path: Path, kind: str = "") -> list[Path]:
    return [path for path in (tmp_path / "store" / TENANT / kind).rglob("*") if path.is_file()]


def test_what_was_encrypted_opens_again_and_shows_nothing_of_itself(keys_of):
    keys = keys_of(demo=["1"]).of(TENANT)

    written = keys[0].encrypt(NAME, DATA)

    assert bytes(opened(keys, NAME, memoryview(written))) == DATA
    assert key_id_of(memoryview(written)) == "1"
    assert DATA[:16] not in bytes(written)
    assert bytes(keys[0].encrypt(NAME, DATA)) != bytes(written)


@pytest.mark.parametrize("flipped", [0, 8, len(MAGIC), len(MAGIC) + 1, len(MAGIC) + 2, 100, -1])
def test_a_flipped_bit_anywhere_is_noticed(keys_of, flipped):
    keys = keys_of(demo=["1"]).of(TENANT)
    written = bytearray(keys[0].encrypt(NAME, DATA))
    written[flipped] ^= 1

    with pytest.raises(KeyNotAtHand):
        opened(keys, NAME, memoryview(written))


@pytest.mark.parametrize("length", [0, len(MAGIC), len(MAGIC) + 1, len(MAGIC) + 5, len(MAGIC) + 20])
def test_what_was_cut_short_is_noticed(keys_of, length):
    keys = keys_of(demo=["1"]).of(TENANT)
    written = keys[0].encrypt(NAME, DATA)

    with pytest.raises(KeyNotAtHand):
        opened(keys, NAME, memoryview(written)[:length])


def test_an_object_opens_under_its_own_name_for_its_own_tenant_with_its_own_key_only(keys_of):
    keys = keys_of(others=["1"])
    written = memoryview(keys.of(TENANT)[0].encrypt(NAME, DATA))
    renamed = memoryview(bytes(written).replace(MAGIC + b"\x011", MAGIC + b"\x012"))

    for theirs, name, data in [
        (keys.of("other"), NAME, written),
        (keys.of(TENANT), f"{TENANT}/blocks/y", written),
        (keys_of(demo=["2"]).of(TENANT), NAME, written),
        (keys_of(others=["2"]).of(TENANT), NAME, renamed),
        (keys_of(other=["1"]).of(TENANT), NAME, written),
        (None, NAME, written),
        (keys.of(TENANT), NAME, memoryview(DATA)),
    ]:
        with pytest.raises(KeyNotAtHand):
            opened(theirs, name, data)


def test_names_are_the_same_for_one_key_and_tell_tenants_and_keys_apart(keys_of):
    keys = keys_of(others=["1", "2"])
    name = keys.of(TENANT)[0].hidden("block")

    assert name == keys_of(others=["1"]).of(TENANT)[0].hidden("block")
    assert len({name, keys.of(TENANT)[1].hidden("block"), keys.of("other")[0].hidden("block"), "block"}) == 4


def test_a_changed_file_counts_and_a_broken_one_changes_nothing_and_is_not_quoted(tmp_path, caplog):
    now_s = 0.0
    path = write_store_keys(tmp_path / "keys", {TENANT: ["1"]})
    keys = StoreKeys(path, monotonic_s=lambda: now_s)
    assert [key.id for key in keys.of(TENANT)] == ["1"]

    write_store_keys(path, {TENANT: ["2", "1"]})
    now_s += 10
    assert [key.id for key in keys.of(TENANT)] == ["2", "1"]
    path.write_text('{"demo": [{"id": "3", "key": "c2VjcmV0"}]}')
    now_s += 10
    with caplog.at_level(logging.DEBUG):
        assert [key.id for key in keys.of(TENANT)] == ["2", "1"]
    assert "reload failed" in caplog.text
    assert "c2VjcmV0" not in caplog.text + repr([record.__dict__ for record in caplog.records])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"demo": []}',
        '{"demo": [{"id": "1"}]}',
        '{"demo": [{"id": "1", "key": "c2VjcmV0"}]}',
        '{"demo": [{"id": "a/b", "key": "c2VjcmV0"}]}',
        '{"a/b": [{"id": "1", "key": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0MTIzNDU2Nzg="}]}',
        '{"demo": [{"id": "1", "key": "%c2VjcmV0"}]}',
        json.dumps({"demo": [{"id": "1", "key": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0MTIzNDU2Nzg="}] * 2}),
    ],
)
def test_a_file_that_is_no_key_file_is_refused_without_being_quoted(tmp_path, text):
    (tmp_path / "keys").write_text(text)

    with pytest.raises(ValueError, match="key file") as caught:
        StoreKeys(tmp_path / "keys")
    assert "c2Vj" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


async def test_nothing_in_the_store_tells_what_it_holds(pod, tmp_path):
    async with pod("a", {TENANT: ["1"]}) as kv:
        new = await kv.share(TEN)
        plain = {key.file_name for key in kv.block_files()}
        pages = kv.path_of(next(iter(kv.block_files()))).read_bytes()[-64:]

    names = " ".join(map(str, stored(tmp_path)))
    assert not [name for name in plain if name in names]
    assert not [path for path in stored(tmp_path, "blocks") if pages in path.read_bytes()]
    assert not [path for path in stored(tmp_path, "manifests") if new.fingerprint.encode() in path.read_bytes()]


async def test_kv_of_a_tenant_without_a_key_stays_out_of_the_store(pod, tmp_path):
    async with pod("a", {"other": ["1"]}) as kv:
        await kv.share(TEN)
        assert kv.counted("store_writes_total", outcome="no_key") == 1

    assert stored(tmp_path) == []


async def test_after_a_new_key_both_read_new_turns_take_it_and_a_delete_removes_what_both_wrote(pod, tmp_path):
    async with pod("a", {TENANT: ["1"]}) as kv:
        await kv.share(TEN, session_id="ctx_1")
    async with pod("a", {TENANT: ["2", "1"]}) as kv:
        old = next(iter(kv.manifest_files()))
        new = await kv.share((*TEN, 10, 11), session_id="ctx_1")
    async with pod("b", {TENANT: ["2", "1"]}) as kv:
        for cache_ref in (old, new.cache_ref):
            await brought(kv, cache_ref)
        assert await kv.load(new) == ["object"] * 3
    async with pod("c", {TENANT: ["2"]}) as kv:
        assert await kv.fetch(new) == ["object"] * 3
    async with pod("d", {TENANT: ["2", "1"]}) as kv:
        await kv.sidecar.delete(TENANT, "ctx_1", [])
    assert stored(tmp_path) == []


@pytest.mark.parametrize("keys", [None, {TENANT: ["2"]}, {"other": ["1"]}], ids=["none", "another", "not its own"])
async def test_a_pod_without_the_key_misses_counts_it_and_removes_nothing_that_others_read(pod, tmp_path, keys):
    async with pod("a", {TENANT: ["1"]}) as kv:
        new = await kv.share(TEN)
        left = stored(tmp_path)
    async with pod("b", keys) as kv:
        await brought(kv, new.cache_ref)
        with pytest.raises(CacheRefNotFound):
            await kv.catalog.open(TENANT, new.cache_ref)
        assert kv.counted("store_unopened_objects_total") == 1
        await kv.collect_shared(s=HOUR_S // 2)
    assert sorted(stored(tmp_path)) == sorted(left)

    async with pod("c", {TENANT: ["1"]}) as kv:
        assert await kv.fetch(new) == ["object"] * 3


async def test_what_nobody_can_open_goes_when_no_session_names_it(pod, tmp_path):
    async with pod("a", {TENANT: ["1"]}) as kv:
        await kv.share(TEN)
    async with pod("b", {TENANT: ["2"]}, manager=NamedRefs()) as kv:
        for _ in range(2):
            await kv.collect_shared(s=120)
    assert stored(tmp_path) == []


async def test_what_nobody_can_decrypt_ends_when_nothing_may_live_longer(pod, tmp_path):
    async with pod("a", {TENANT: ["1"]}) as kv:
        await kv.share(TEN, session_id=f"{KEPT_PREFIX}1")
    async with pod("b", {TENANT: ["2"]}) as kv:
        await kv.collect_shared(s=MAX_TTL_S - 60)
        assert len(stored(tmp_path, "manifests")) == 1
        await kv.collect_shared(s=120)
    assert stored(tmp_path) == []
