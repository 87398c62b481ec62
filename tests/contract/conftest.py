"""What contract tests share: the fake Kubernetes API and a client of it."""

from __future__ import annotations

import pytest

from tests.helpers.fake_kube import FakeKube
from tests.helpers.kube_servers import client_of


@pytest.fixture
async def kube():
    async with FakeKube() as kube:
        yield kube


@pytest.fixture
async def fake_admin(kube, tmp_path, monkeypatch):
    admin = client_of(kube.write_kubeconfig(tmp_path / "kubeconfig"), monkeypatch)
    yield admin
    await admin.close()
