"""A manager with a Lease on an API server: it takes it at the start and gives it back at the end."""

from __future__ import annotations

import asyncio

import pytest
from kubernetes.aio import config

from context_manager.__main__ import serve
from context_manager.settings import ManagerSettings
from tests.helpers.fake_kube import FakeKube
from tests.helpers.gateway_server import DEADLINE_S

LEASE = ("leases", "ns", "cc-sweeper")


@pytest.fixture
async def kube(tmp_path, monkeypatch):
    async with FakeKube() as kube:
        path = kube.write_kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setattr(config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
        yield kube


def holder(kube) -> str:
    return kube.objects[LEASE]["spec"]["holderIdentity"] if LEASE in kube.objects else ""


async def test_a_manager_holds_the_lease_until_it_ends(kube):
    # A long duration, because the machine may stand still; Redis need not be there.
    settings = ManagerSettings(
        listen="127.0.0.1:0",
        redis_url="redis://127.0.0.1:1",
        sweep_lease="cc-sweeper",
        sweep_lease_identity="manager-0",
        sweep_lease_duration_s=300,
    )
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(settings, stop))
    async with asyncio.timeout(DEADLINE_S):
        while not holder(kube).startswith("manager-0_"):
            assert not serving.done(), serving.exception()
            await asyncio.sleep(0.02)
    stop.set()
    await asyncio.wait_for(serving, DEADLINE_S)

    assert holder(kube) == ""
    assert {plural for _, plural in kube.requests} == {"leases"}
    assert {verb for verb, _ in kube.requests} == {"get", "create", "update"}
