"""The shared tier over a real S3 server on loopback, behind a proxy that is slow, fails, cuts off or lies when told."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from contextcache.clock import SystemClock
from contextcache.errors import CacheRefNotFound
from deploy.local import s3_server
from kv_sidecar.store.objects import ObjectStore
from tests.kit.kv_blocks import FINGERPRINT, TENANT, SidecarUnderTest
from tests.kit.lying_store import BLOCKS, LyingStore
from tests.kit.ports import free_port
from tests.kit.until import until, wait_until

pytestmark = pytest.mark.thorough

TEN = tuple(range(10))
CALL_S = 1.0
"""Deadline of one call to the store: of two, the second is seen to end as well."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server with the bucket."""
    port = free_port()
    with (tmp_path_factory.mktemp("s3") / "log").open("wb") as log:
        process = subprocess.Popen([s3_server.installed(), "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
        try:
            wait_until(lambda: s3_server.has_bucket(port), what="the S3 server answers")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


@pytest.fixture
async def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LyingStore]:
    async with LyingStore(server).running() as proxy:
        for name, value in s3_server.environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def pod(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Return a running sidecar with a disk of its own, over a prefix of the test's own."""

    @asynccontextmanager
    async def running(name: str, *, call_s: float = CALL_S, **more: object) -> AsyncIterator[SidecarUnderTest]:
        monkeypatch.setattr("kv_sidecar.sidecar.ObjectStore", partial(ObjectStore, timeout_s=call_s))
        settings = {"store_url": url_of(request.node.name), "pull_timeout_s": 3}
        async with SidecarUnderTest(tmp_path / name, clock=SystemClock(), **{**settings, **more}) as kv:
            kv.sidecar.engine.introduce(0, 1, FINGERPRINT, "")
            yield kv

    return running


def url_of(test: str) -> str:
    return f"s3://{s3_server.BUCKET}/{test.replace(' ', '-').replace('[', '/').strip(']')}"


async def names(test: str) -> set[str]:
    return {found.name async for found in ObjectStore(url_of(test), timeout_s=10).listed(f"{TENANT}/")}


async def brought(kv: SidecarUnderTest, cache_ref: str) -> None:
    assert kv.sidecar.resolver.bring(TENANT, [cache_ref])
    await until(_value(lambda: kv.sidecar.pulls.num_pulls), is_so=lambda number: not number, what="the pull has ended")


def _value(read: Callable[[], float]) -> Callable[[], Awaitable[float]]:
    async def value() -> float:
        return read()

    return value


async def test_a_context_outlives_its_pod_and_its_delete_leaves_no_object(proxy, pod, request):
    async with pod("a", call_s=60) as kv:
        new = await kv.save(TEN, session_id="ctx_1")
        other = await kv.save((*TEN[:4], 77, 78), session_id="ctx_2")
        assert await kv.sidecar.shared.flush(60) == 0
    async with pod("b", call_s=60, pull_timeout_s=60) as kv:
        await brought(kv, new.cache_ref)
        assert await kv.load(new) == ["object"] * 3
        await kv.sidecar.delete(TENANT, "ctx_1", [new.cache_ref])
        kinds = sorted(name.split("/")[1] for name in await names(request.node.name))
        assert kinds == ["blocks", "blocks", "holders", "holders", "manifests", "sessions"]
        await brought(kv, other.cache_ref)
        await kv.sidecar.delete(TENANT, "ctx_2", [other.cache_ref])
    assert await names(request.node.name) == set()


@pytest.mark.parametrize("named", [BLOCKS, "/manifests/"], ids=["blocks", "manifests"])
@pytest.mark.parametrize("fault", ["slow", "errors", "cut", "wrong bytes"])
async def test_a_store_that_does_not_serve_is_a_miss_in_time_with_nothing_left_and_then_serves_again(
    proxy, pod, fault, named
):
    async with pod("a") as kv:
        new = await kv.save(TEN)
        assert await kv.sidecar.shared.flush(60) == 0
    async with pod("b") as kv:
        proxy.fault, proxy.named = fault, named
        await brought(kv, new.cache_ref)
        with pytest.raises(CacheRefNotFound):
            await kv.catalog.open(TENANT, new.cache_ref)
        assert (kv.block_files(), kv.manifest_files(), kv.missing_bytes()) == (set(), set(), 0)
        assert kv.counted("pulls_total", outcome="pulled") == 0
        assert kv.counted("pulls_total", outcome="internal_error") == 0

    proxy.fault = ""
    async with pod("c", call_s=60, pull_timeout_s=60) as kv:
        await brought(kv, new.cache_ref)
        assert await kv.load(new) == ["object"] * 3


@pytest.mark.parametrize("fault", ["slow", "errors"])
async def test_saves_and_deletes_do_not_wait_for_a_store_that_does_not_serve(proxy, pod, request, fault):
    async with pod("a") as kv:
        proxy.fault, proxy.named = fault, "/"
        new = await kv.save(TEN)
        assert await kv.load(new) == ["host"] * 3
        await until(
            _value(lambda: kv.counted("store_writes_total", outcome="unavailable")),
            is_so=bool,
            what="a write was refused",
        )
        proxy.fault = ""
        assert await kv.sidecar.shared.flush(60) == 0
        proxy.fault = fault
        await kv.sidecar.delete(TENANT, new.session_id, [new.cache_ref])
        with pytest.raises(CacheRefNotFound):
            await kv.catalog.open(TENANT, new.cache_ref)
        proxy.fault = ""
        await kv.sidecar.shared.flush(60)
    assert await names(request.node.name) == set()
