"""What the gateway expects of a kv-sidecar. A subclass gives `sidecar`, `keep` and `take_down`."""

from __future__ import annotations

import pytest

from contextcache.errors import CacheRefNotFound, SidecarUnavailable
from contextcache.model import SaveOutcome, new_cache_ref
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

    async def test_a_touch_moves_the_end_of_a_sessions_kv_and_of_no_other(self, sidecar, keep):
        ref, other = await keep("ctx_1", "demo"), await keep("ctx_2", "demo")
        before, _ = await sidecar.get_manifest("demo", other)
        end_ms = before.expires_at_ms + 5000

        assert await sidecar.touch_context("demo", "ctx_1", end_ms) == 1
        assert await sidecar.touch_context("foreign", "ctx_1", end_ms + 1) == 0
        assert await sidecar.touch_context("demo", "ctx_none", end_ms) == 0
        assert (await sidecar.get_manifest("demo", ref))[0].expires_at_ms == end_ms
        assert (await sidecar.get_manifest("demo", other))[0] == before

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
            await sidecar.stats()
