"""What the gateway expects of a kv-sidecar. A subclass gives `sidecar`, `keep` and `take_down`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contextcache.errors import CacheRefNotFound, SidecarUnavailable
from contextcache.model import Promise, SaveOutcome
from contextcache.names import new_cache_ref
from kv_sidecar.client import TIER_NAMES


class GatewaySidecarContract:
    """`keep(session_id, tenant)` seals a context of 300 tokens and returns its cache_ref."""

    async def test_a_sealed_manifest_is_told_with_its_tier(self, sidecar, keep):
        ref = await keep("ctx_1", "demo")
        manifest, tier = await sidecar.get_manifest("demo", ref)

        assert (manifest.cache_ref, manifest.session_id, manifest.tenant) == (ref, "ctx_1", "demo")
        assert manifest.size_bytes > 0
        assert tier in {"host", "disk"}

    async def test_an_unknown_and_a_foreign_ref_are_not_found(self, sidecar, keep):
        ref = await keep("ctx_1", "demo")
        for tenant, asked in (("demo", new_cache_ref()), ("other", ref)):
            with pytest.raises(CacheRefNotFound):
                await sidecar.get_manifest(tenant, asked)

    async def test_whether_kv_is_durable_is_told_without_waiting(self, sidecar, keep):
        ref = await keep("ctx_1", "demo")

        assert await sidecar.wait_sealed("demo", ref, timeout_ms=0) == SaveOutcome(is_sealed=True)
        assert await sidecar.wait_sealed("other", ref, timeout_ms=0) == SaveOutcome(is_sealed=False)
        assert await sidecar.wait_sealed("demo", new_cache_ref(), timeout_ms=0) == SaveOutcome(is_sealed=False)

    async def test_placements_are_carried_out_for_sealed_kv_of_its_tenant_alone(self, sidecar, keep):
        """Seen failing: without `placements` in the request nothing was carried out."""
        ref = await keep("ctx_1", "demo")
        foreign = await sidecar.wait_sealed("other", ref, timeout_ms=0, placements=("demote",))
        _, tier = await sidecar.get_manifest("demo", ref)
        outcome = await sidecar.wait_sealed("demo", ref, timeout_ms=0, placements=("prefetch", "demote"))

        assert foreign.placements == ()
        assert tier == "host"
        assert [it.outcome for it in outcome.placements] == ["accepted"] * 2
        assert all(it.size_bytes > 0 and it.tier in {"host", "disk"} for it in outcome.placements)

    async def test_a_promise_is_given_for_sealed_kv_of_its_tenant_alone(self, sidecar, keep):
        ref = await keep("ctx_1", "demo")
        promise = await sidecar.retain_context("demo", [new_cache_ref(), ref], retain_ms=60_000, pinned=False)
        foreign = await sidecar.retain_context("other", [ref], retain_ms=60_000, pinned=False)
        absent = await sidecar.retain_context("demo", [new_cache_ref()], retain_ms=60_000, pinned=False)

        assert promise.until_ms > 0
        assert promise == Promise(promise.until_ms)
        assert foreign == absent == Promise(reason="not_saved")

    async def test_a_delete_by_session_frees_its_bytes_once(self, sidecar, keep):
        ref = await keep("ctx_1", "demo")
        kept = await keep("ctx_2", "demo")

        assert await sidecar.delete_context("demo", session_id="ctx_1", cache_refs=(ref,)) > 0
        assert await sidecar.delete_context("demo", session_id="ctx_1", cache_refs=(ref,)) == 0
        with pytest.raises(CacheRefNotFound):
            await sidecar.get_manifest("demo", ref)
        assert await sidecar.get_manifest("demo", kept)

    async def test_a_delete_touches_no_other_tenants_kv(self, sidecar, keep):
        ref = await keep("ctx_1", "demo")

        assert await sidecar.delete_context("other", session_id="ctx_1", cache_refs=(ref,)) == 0
        assert await sidecar.get_manifest("demo", ref)

    async def test_what_is_kept_of_plain_requests_is_shown_to_its_tenant_and_deleted_by_its_group(self, sidecar, keep):
        await keep("kept_1", "demo")
        await keep("kept_2", "demo")
        await keep("ctx_1", "demo")

        groups = await sidecar.list_kept("demo")
        assert {group.group for group in groups} == {"kept_1", "kept_2"}
        assert all(group.num_tokens > 0 and group.size_bytes > 0 and group.expires_at_ms > 0 for group in groups)
        assert [group.group for group in await sidecar.list_kept("demo", "kept_1")] == ["kept_1"]
        assert await sidecar.list_kept("demo", "ctx_1") == []
        assert await sidecar.list_kept("other") == []
        assert await sidecar.delete_context("demo", session_id="kept_1") > 0
        assert [group.group for group in await sidecar.list_kept("demo")] == ["kept_2"]

    async def test_a_touch_moves_the_end_of_a_sessions_kv_and_of_no_other(self, sidecar, keep):
        ref, other = await keep("ctx_1", "demo"), await keep("ctx_2", "demo")
        before, _ = await sidecar.get_manifest("demo", other)
        end_ms = before.expires_at_ms + 5000

        assert await sidecar.touch_context("demo", "ctx_1", end_ms) == 1
        assert await sidecar.touch_context("foreign", "ctx_1", end_ms + 1) == 0
        assert await sidecar.touch_context("demo", "ctx_none", end_ms) == 0
        assert (await sidecar.get_manifest("demo", ref))[0].expires_at_ms == end_ms
        assert (await sidecar.get_manifest("demo", other))[0] == before

    async def fork(self, sidecar, *sources, session_id="ctx_fork", tenant="demo", expires_at_ms=2_000_000_000_000):
        """Fork, and return the fork's ref and what it has."""
        ref = new_cache_ref()
        forked = await sidecar.fork_context(
            tenant, sources, session_id=session_id, cache_ref=ref, expires_at_ms=expires_at_ms
        )
        return ref, forked

    async def test_a_fork_has_the_same_kv_under_a_name_of_its_own(self, sidecar, keep):
        ref = await keep("ctx_1", "demo")
        source, _ = await sidecar.get_manifest("demo", ref)
        child, forked = await self.fork(sidecar, new_cache_ref(), ref)
        manifest, tier = await sidecar.get_manifest("demo", child)

        assert (forked.size_bytes, forked.tier) == (source.size_bytes, tier)
        assert manifest == replace(
            source, cache_ref=child, session_id="ctx_fork", expires_at_ms=2_000_000_000_000, tail_ref=ref
        )
        assert (await sidecar.get_manifest("demo", ref))[0] == source

    async def test_of_a_context_and_its_forks_the_last_to_go_frees_the_bytes(self, sidecar, keep):
        ref = await keep("ctx_1", "demo")
        child, _ = await self.fork(sidecar, ref, session_id="ctx_2")
        grandchild, _ = await self.fork(sidecar, child, session_id="ctx_3")

        assert (await sidecar.get_manifest("demo", grandchild))[0].tail_ref == ref
        assert await sidecar.delete_context("demo", session_id="ctx_1", cache_refs=(ref,)) == 0
        assert await sidecar.get_manifest("demo", child)
        assert await sidecar.delete_context("demo", session_id="ctx_2") == 0
        assert await sidecar.get_manifest("demo", grandchild)
        assert await sidecar.delete_context("demo", session_id="ctx_3") > 0

    async def test_what_is_not_there_or_another_tenants_is_not_forked(self, sidecar, keep):
        ref = await keep("ctx_1", "demo")
        for tenant, source in (("demo", new_cache_ref()), ("other", ref)):
            child, forked = await self.fork(sidecar, source, tenant=tenant)
            assert not forked
            with pytest.raises(CacheRefNotFound):
                await sidecar.get_manifest(tenant, child)

    async def test_a_pull_of_what_is_here_already_is_told_as_such(self, sidecar, keep):
        ref = await keep("ctx_1", "demo")

        assert await sidecar.pull_context("demo", (ref, new_cache_ref()), peer="127.0.0.1:1") == "present"

    async def test_a_sidecar_says_how_many_contexts_it_has_and_where(self, sidecar, keep):
        await keep("ctx_1", "demo")
        stats = await sidecar.stats()

        assert stats.num_contexts == 1
        assert {TIER_NAMES[found.tier] for found in stats.tiers} == {"host", "disk"}

    async def test_without_a_sidecar_every_call_says_so(self, sidecar, keep, take_down):
        ref = await keep("ctx_1", "demo")
        await take_down()
        with pytest.raises(SidecarUnavailable):
            await sidecar.get_manifest("demo", ref)
        with pytest.raises(SidecarUnavailable):
            await sidecar.delete_context("demo", session_id="ctx_1")
        with pytest.raises(SidecarUnavailable):
            await sidecar.pull_context("demo", (ref,), peer="127.0.0.1:1")
        with pytest.raises(SidecarUnavailable):
            await sidecar.touch_context("demo", "ctx_1", 2_000_000_000_000)
        with pytest.raises(SidecarUnavailable):
            await self.fork(sidecar, ref)
        with pytest.raises(SidecarUnavailable):
            await sidecar.stats()
