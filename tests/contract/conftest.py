"""What contract tests share: the fake Kubernetes API with a client of it, and Valkey, alone and as a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.fake_kube import FakeKube
from tests.kit.kube_servers import client_of
from tests.kit.valkey import ValkeyServer


@pytest.fixture
async def kube():
    async with FakeKube() as kube:
        yield kube


@pytest.fixture
async def fake_admin(kube, tmp_path, monkeypatch):
    admin = client_of(kube.write_kubeconfig(tmp_path / "kubeconfig"), monkeypatch)
    yield admin
    await admin.close()


@pytest.fixture(params=[False, True], ids=["single", "cluster"], scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey"), cluster=request.param) as server:
        yield server
