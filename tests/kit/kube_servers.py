"""API servers that the Kubernetes contract runs on: the fake always, a real one where `TEST_KUBECONFIG` names a file.

The real one's current context must allow everything on pods and EndpointSlices of its namespace, and the tests empty
that.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kubernetes.aio import config

from contextcache.kubernetes.objects import ENDPOINT_SLICES, PODS
from tests.kit.fake_kube import FakeKube
from tests.kit.kube_objects import KubeAdmin

REAL = os.environ.get("TEST_KUBECONFIG", "")
SERVERS = [
    "fake",
    pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="TEST_KUBECONFIG is not set")),
]


def client_of(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> KubeAdmin:
    """Return a client as a process would make it whose `KUBECONFIG` this is."""
    monkeypatch.setattr(config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    return KubeAdmin.by_surroundings()


@asynccontextmanager
async def running_server(kind: str, directory: Path) -> AsyncIterator[tuple[FakeKube | None, Path]]:
    """Give the fake, where it is one, and a file for `KUBECONFIG`."""
    if kind == "real":
        yield None, Path(REAL)
        return
    async with FakeKube() as kube:
        yield kube, kube.write_kubeconfig(directory / "kubeconfig")


@asynccontextmanager
async def emptied_server(
    kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[FakeKube | None, KubeAdmin]]:
    """Give the fake, where it is one, and a client of the server, on which nothing is left of earlier tests."""
    async with running_server(kind, directory) as (kube, kubeconfig):
        admin = client_of(kubeconfig, monkeypatch)
        try:
            await empty(admin)
            yield kube, admin
        finally:
            await admin.close()


async def empty(admin: KubeAdmin) -> None:
    """Remove what a test before has left."""
    for resource in (ENDPOINT_SLICES, PODS):
        await admin.remove_all(resource)
