"""What a pull may expect of a peer, whoever it is. `there` holds the KV; `peer` is the line to it."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import pytest

from contextcache.errors import CacheRefNotFound, FingerprintMismatch
from contextcache.model import KVGroup
from contextcache.names import new_cache_ref
from kv_sidecar.format.block_file import parse_block_file
from kv_sidecar.format.ids import pack_token_ids
from kv_sidecar.format.manifest import block_meta
from kv_sidecar.sealed.prefixes import PrefixQuestion
from tests.kit.kv_blocks import FINGERPRINT, TENANT
from tests.kit.until import until

PROMPT = tuple(range(10))


class SidecarPeerContract:
    async def test_it_has_the_manifest_of_what_is_sealed_there(self, there, peer):
        new = await there.save(PROMPT)

        assert await peer.manifest(TENANT, new.cache_ref) == await there.catalog.open(TENANT, new.cache_ref)

    async def test_it_has_the_manifest_of_several_groups_and_their_files(self, there, peer):
        groups = (
            KVGroup("full_attention", 4, ((0, 10),), 0, "a0" * 8),
            KVGroup("sliding_window", 4, ((0, 2), (6, 10)), 4, "b0" * 8),
        )
        new = await there.save(PROMPT, groups=groups)
        manifest = await peer.manifest(TENANT, new.cache_ref)
        async with aclosing(peer.block_files(manifest, 0, range(6))) as files:
            async for file in files:
                parse_block_file(bytes(file.data)).verify(block_meta(manifest, file.index, 0))
                file.release()

        assert manifest == await there.catalog.open(TENANT, new.cache_ref)
        assert len(manifest.files) == 6

    async def test_it_says_what_it_has_that_begins_like_a_prompt_where_that_is_enough(self, there, peer):
        new = await there.save(PROMPT)
        question = PrefixQuestion(TENANT, FINGERPRINT, pack_token_ids((*PROMPT[:9], 77, 78)), 1)
        other = replace(question, tenant="other")

        goes_on = replace(question, token_ids=pack_token_ids((*PROMPT, 77, 78)))

        (found,), (whole,) = await peer.match(question, 8), await peer.match(goes_on, 8)
        assert (found.cache_ref, found.num_tokens, found.is_whole) == (new.cache_ref, 9, False)
        assert (whole.cache_ref, whole.num_tokens, whole.is_whole) == (new.cache_ref, len(PROMPT), True)
        assert list(await peer.match(question, 10)) == list(await peer.match(other, 8)) == []

    async def test_what_is_absent_or_anothers_is_not_found(self, there, peer):
        new = await there.save(PROMPT)

        for tenant, ref in ((TENANT, new_cache_ref()), ("other", new.cache_ref)):
            with pytest.raises(CacheRefNotFound):
                await peer.manifest(tenant, ref)

    async def test_it_hands_out_whole_files_in_the_order_asked_for(self, there, peer):
        new = await there.save(PROMPT)
        manifest = await peer.manifest(TENANT, new.cache_ref)
        seen = []
        async with aclosing(peer.block_files(manifest, 0, [2, 0])) as files:
            async for file in files:
                parse_block_file(bytes(file.data)).verify(block_meta(manifest, file.index, 0))
                file.release()
                seen.append(file.index)

        assert seen == [2, 0]

    async def test_kv_that_went_meanwhile_is_not_found(self, there, peer):
        new = await there.save(PROMPT)
        manifest = await peer.manifest(TENANT, new.cache_ref)
        await there.catalog.delete(TENANT, new.session_id, ())

        with pytest.raises(CacheRefNotFound):
            [file.index async for file in peer.block_files(manifest, 0, [0])]

    async def test_another_fingerprint_gets_nothing(self, there, peer):
        new = await there.save(PROMPT)
        manifest = replace(await peer.manifest(TENANT, new.cache_ref), fingerprint="e" * 64)

        with pytest.raises(FingerprintMismatch):
            [file.index async for file in peer.block_files(manifest, 0, [0])]

    async def test_who_leaves_early_keeps_nothing_pinned_there(self, there, peer):
        new = await there.save(PROMPT)
        manifest = await peer.manifest(TENANT, new.cache_ref)
        async with aclosing(peer.block_files(manifest, 0, [0, 1, 2])) as files:
            (await anext(files)).release()

        await until(lambda: not there.has_leases, what="no block is pinned")
