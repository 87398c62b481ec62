"""Bounds that an operator sets are those that hold."""

import asyncio
from pathlib import Path

import pytest

from contextcache.errors import CacheRefNotFound, ContextDeleted
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.accounts import LoadReports
from kv_sidecar.moving.peer import STREAMS_MAX, FrameAssembly
from kv_sidecar.server import KVSidecarServicer
from kv_sidecar.settings import SidecarSettings
from tests.kit.kv_blocks import TENANT, SidecarUnderTest, new_save

PROMPT = tuple(range(10))


async def test_of_the_names_that_were_deleted_the_oldest_may_be_saved_again(tmp_path: Path) -> None:
    """A context has two names: its own and that of its prompt's end."""
    async with SidecarUnderTest(tmp_path, max_tombstones=2) as kv:
        first, second = (new_save(PROMPT, now_ms=kv.clock.now_ms()) for _ in range(2))
        for new in (first, second):
            await kv.catalog.delete(TENANT, "", [new.cache_ref])

        assert await kv.catalog.prepare_save(first)
        with pytest.raises(ContextDeleted):
            await kv.catalog.prepare_save(second)


async def test_the_newest_reports_are_kept(kv: SidecarUnderTest) -> None:
    kv.sidecar.reports = LoadReports(kv.clock, max_reports=2)
    for name in "abc":
        kv.sidecar.reports.put(pb.LoadReport(request_id=name))

    assert len(kv.sidecar.reports) == 2
    with pytest.raises(CacheRefNotFound):
        await kv.sidecar.reports.get("a", timeout_s=0)


async def test_as_many_tenants_as_wanted_are_shown_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_sidecar.sidecar.TENANTS_SHOWN_MAX", 1)
    async with SidecarUnderTest(tmp_path) as kv:
        await kv.save(PROMPT, tenant="small", session_id="ctx_small")
        await kv.save(tuple(range(100)), tenant="large", session_id="ctx_large")
        await kv.sidecar.collect()

        samples = [sample for metric in kv.registry.collect() for sample in metric.samples]
        shown = {sample.labels.get("tenant") for sample in samples}
        assert "large" in shown
        assert "small" not in shown


async def test_as_many_files_come_by_frames_at_once_as_wanted(tmp_path: Path) -> None:
    async with SidecarUnderTest(tmp_path, slots=False) as kv:
        slots = KVSidecarServicer(kv.sidecar)._frame_slots
        streams = [FrameAssembly(slots, limit_bytes=100) for _ in range(STREAMS_MAX + 1)]
        for stream in streams[:-1]:
            await stream.add(("ref", 0, 0), b"x", last=False)
        third = asyncio.create_task(streams[-1].add(("ref", 0, 1), b"y", last=True))
        await asyncio.sleep(0)
        assert not third.done()

        streams[0].close()
        assert await third == b"y"


def test_an_empty_variable_is_none_where_none_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen failing without the rule: an empty text was refused as a number of bytes."""
    for name in ("UNIX_SOCKET", "MEMORY_LIMIT_BYTES", "STORE_KEYS_FILE", "TLS_CERT_FILE", "ENDPOINT_NAME"):
        monkeypatch.setenv(f"SIDECAR_{name}", "")
    found = SidecarSettings()

    assert [found.unix_socket, found.memory_limit_bytes, found.store_keys_file, found.tls_cert_file] == [None] * 4
    assert found.endpoint_name == ""
