"""Events: what a subscriber knows after them is what the records list, and nothing of a tenant that is not listed.

The order of events is tested with every other event of the sidecar in test_kv_every_byte.py, and over real sockets with
other projects' decoders in tests/integration/test_kv_events.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from contextcache.errors import CacheRefNotFound
from contextcache.model import KVGroup
from kv_sidecar.events.view import EventView
from kv_sidecar.settings import SidecarSettings
from tests.kit.event_subscribers import Fold
from tests.kit.kv_blocks import FINGERPRINT, TENANT, SidecarUnderTest, new_save

PROMPT = tuple(range(10))
DIGESTS = ("a" * 16, "b" * 16)


def watched(kv: SidecarUnderTest, *tenants: str) -> EventView:
    view = EventView(kv.blocks, tenants or (TENANT,))
    kv.catalog.manifests.on_found = view.learn
    return view


def applied(view: EventView, fold: Fold) -> dict[str, int]:
    """Apply all events, and return how many blocks are known by medium."""
    while view.changed.is_set():
        fold.apply(view.take(3))
    return {medium: len(hashes) for medium, hashes in fold.listing.items()}


async def test_a_sealed_block_is_announced_with_its_tokens_and_removed_when_its_last_context_goes(
    kv: SidecarUnderTest,
) -> None:
    """Seen failing: when a block is announced before its manifest, and when the first delete removes a shared block."""
    view, fold = watched(kv), Fold()
    new = await kv.sent(PROMPT)
    assert applied(view, fold) == {"STORAGE": 0, "CPU": 0}
    await kv.catalog.seal(new.cache_ref, 0)
    events = view.take(1)
    fold.apply(events)

    assert [event["token_ids"] for event in events] == [PROMPT[:4], PROMPT[:4]]
    assert [event["medium"] for event in events] == ["STORAGE", "CPU"]
    assert (events[0]["parent_block_hash"], events[0]["block_size"], events[0]["group_idx"]) == (None, 4, 0)
    assert events[0]["kv_cache_spec_kind"] == "full_attention"
    assert applied(view, fold) == {"STORAGE": 2, "CPU": 2}
    other = await kv.save((*PROMPT[:4], 50, 51, 52, 53), session_id="ctx_2")
    assert applied(view, fold) == {"STORAGE": 3, "CPU": 3}
    await kv.catalog.delete(TENANT, "", [new.cache_ref])
    assert applied(view, fold) == {"STORAGE": 2, "CPU": 2}
    await kv.catalog.delete(TENANT, "", [other.cache_ref])
    assert applied(view, fold) == {"STORAGE": 0, "CPU": 0}
    assert not view._known


async def test_a_copy_in_memory_that_makes_room_is_removed_there_alone(tmp_path: Path) -> None:
    """Seen failing: when the memory tier does not say which slot it evicts."""
    async with SidecarUnderTest(tmp_path, memory_limit_bytes=4096) as kv:
        view, fold = watched(kv), Fold()
        for first in range(20):
            await kv.save(tuple(range(first * 100, first * 100 + 8)), session_id=f"ctx_{first}")
            counts = applied(view, fold)

        assert counts["STORAGE"] == 40
        assert counts["CPU"] == len(kv.in_memory()) < 40


async def test_a_block_that_only_a_lease_keeps_is_removed(kv: SidecarUnderTest) -> None:
    """Seen failing: when a block without a manifest counts as stored."""
    view, fold = watched(kv), Fold()
    new = await kv.save(PROMPT)
    keys = [key for key in kv.block_files() if key.kind == "block"]
    kv.blocks.hold(keys, "lease")
    assert applied(view, fold) == {"STORAGE": 2, "CPU": 2}
    await kv.catalog.delete(TENANT, "", [new.cache_ref])

    assert applied(view, fold) == {"STORAGE": 0, "CPU": 0}
    assert set(keys) <= kv.block_files()
    kv.blocks.let_go(keys, "lease")


async def test_a_file_that_vanished_is_removed_and_announced_when_another_save_brings_it(tmp_path: Path) -> None:
    """Seen failing: when the end of a step is not noted."""
    async with SidecarUnderTest(tmp_path, memory_limit_bytes=0) as kv:
        view, fold = watched(kv), Fold()
        new = await kv.save(PROMPT)
        assert applied(view, fold) == {"STORAGE": 2, "CPU": 0}
        for key in [key for key in kv.block_files() if key.kind == "block"]:
            kv.path_of(key).unlink()
        manifest = await kv.catalog.open(TENANT, new.cache_ref)
        for index in range(2):
            with pytest.raises(CacheRefNotFound):
                async for _ in kv.catalog.load(manifest, FINGERPRINT, 0, [index], in_slots=False):
                    pass
        assert applied(view, fold) == {"STORAGE": 0, "CPU": 0}
        await kv.sent(PROMPT, session_id="ctx_2")

        assert applied(view, fold) == {"STORAGE": 2, "CPU": 0}


async def test_a_tenant_that_is_not_listed_and_kv_of_an_adapter_are_left_out(kv: SidecarUnderTest) -> None:
    view, fold = watched(kv, "listed"), Fold()
    await kv.save(PROMPT)
    await kv.save(PROMPT, tenant="listed", session_id="ctx_2", fingerprint=f"{FINGERPRINT}+{'a' * 32}")
    assert not view.changed.is_set()
    await kv.save(PROMPT, tenant="listed", session_id="ctx_3")

    assert applied(view, fold) == {"STORAGE": 2, "CPU": 2}


async def test_a_block_of_two_ranks_is_announced_once_both_have_it(kv: SidecarUnderTest) -> None:
    view, fold = watched(kv), Fold()
    new = await _saved_by_two_ranks(kv)
    assert applied(view, fold) == {"STORAGE": 2, "CPU": 2}
    block = kv.blocks.get(next(key for key in kv.in_memory() if key.kind == "block" and key.rank == 1))
    with kv.blocks.step("read", block):
        kv.blocks.drop_copy(block)

    assert applied(view, fold) == {"STORAGE": 2, "CPU": 1}
    await kv.catalog.delete(TENANT, "", [new.cache_ref])
    assert applied(view, fold) == {"STORAGE": 0, "CPU": 0}


async def _saved_by_two_ranks(kv: SidecarUnderTest):
    news = [
        new_save(PROMPT, now_ms=kv.clock.now_ms(), cache_ref="ref_" + "0" * 32, rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    for new in news:
        await kv.send_all(new)
    sealed = [await kv.catalog.seal(new.cache_ref, new.rank) for new in news]
    assert sealed == [False, True]
    return news[0]


async def test_groups_of_one_engine_are_told_apart_by_their_index_and_kind(tmp_path: Path) -> None:
    """Two groups have the same hashes, as in vLLM."""
    groups = (
        KVGroup("full_attention", 4, ((0, 12),), digest=DIGESTS[0]),
        KVGroup("sliding_window", 4, ((4, 12),), window=5, digest=DIGESTS[1]),
    )
    async with SidecarUnderTest(tmp_path) as kv:
        view = watched(kv)
        await kv.save(tuple(range(12)), groups=groups)
        found = [event for event in view.take(100) if event["medium"] == "STORAGE"]

        assert [event["group_idx"] for event in found] == [0, 0, 0, 1, 1]
        assert {event["kv_cache_spec_kind"] for event in found[3:]} == {"sliding_window"}
        assert {event["kv_cache_spec_sliding_window"] for event in found[3:]} == {5}
        assert [event["block_hashes"] for event in found[1:3]] == [event["block_hashes"] for event in found[3:]]


@pytest.mark.parametrize("listen", ["5557", ":5557", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65535", "127.0.0.1:x"])
def test_an_address_without_room_for_two_ports_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match="SIDECAR_EVENTS_LISTEN must be host:port, with a port of 1 to 65534"):
        SidecarSettings(events_listen=listen, events_tenants=("*",))


def test_an_address_without_tenants_is_refused() -> None:
    with pytest.raises(ValueError, match="set SIDECAR_EVENTS_TENANTS too"):
        SidecarSettings(events_listen="127.0.0.1:5557")
