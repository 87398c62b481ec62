"""What a pod is given to speak to its API server with: files that are replaced while it runs."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from contextcache.kubernetes.client import KubernetesApi
from contextcache.kubernetes.objects import (
    PODS,
    KubernetesForbidden,
    KubernetesUnauthorized,
    KubernetesUnavailable,
    Selection,
)
from tests.kit.fake_kube import TOKEN, FakeKube

SELECTION = Selection(PODS, "team-a", "")


def server_tls(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.fixture
def ca():
    return trustme.CA()


@pytest.fixture
async def kube(ca):
    async with FakeKube(tls=server_tls(ca)) as kube:
        yield kube


@pytest.fixture
def account(tmp_path, ca) -> Path:
    """A mounted service account."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text("team-a\n")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    return tmp_path


@pytest.fixture
async def api(kube, account):
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(kube.port)}
    api = KubernetesApi.in_pod(account, environ=environ)
    yield api
    await api.close()


async def test_a_pod_uses_its_service_account(api):
    assert api.namespace == "team-a"
    assert (await api.list(SELECTION)).objects == ()


async def test_a_rotated_token_is_read_when_the_old_one_is_refused(api, kube, account):
    await api.list(SELECTION)
    kube.token = "rotated"
    (account / "token").write_text("rotated")
    with pytest.raises(KubernetesUnauthorized):
        await api.list(SELECTION)

    assert (await api.list(SELECTION)).objects == ()


async def test_a_server_of_another_ca_is_not_spoken_to(api, kube):
    kube.tls = server_tls(trustme.CA())
    await kube.away()
    await kube.back()

    with pytest.raises(KubernetesUnavailable, match="connection to the Kubernetes API server failed"):
        await api.list(SELECTION)
    assert kube.requests == []


async def test_a_rotated_ca_is_read_when_the_old_one_does_not_do(api, kube, account):
    await api.list(SELECTION)
    other = trustme.CA()
    kube.tls = server_tls(other)
    await kube.away()
    await kube.back()
    other.cert_pem.write_to_path(str(account / "ca.crt"))
    with pytest.raises(KubernetesUnavailable):
        await api.list(SELECTION)

    with pytest.raises(KubernetesForbidden):  # it answers, and has not read its Roles yet
        await api.list(SELECTION)


async def test_a_token_that_is_being_replaced_is_an_error_that_passes(api, account):
    (account / "token").write_text("")
    with pytest.raises(KubernetesUnavailable):
        await api.list(SELECTION)
    (account / "token").write_text(TOKEN)

    assert (await api.list(SELECTION)).objects == ()


async def test_errors_never_hold_the_token(api, kube):
    kube.token = "another"
    with pytest.raises(KubernetesUnauthorized) as refused:
        await api.list(SELECTION)
    await kube.away()
    with pytest.raises(KubernetesUnavailable) as away:
        await api.list(SELECTION)

    assert TOKEN not in str(refused.value) + str(away.value) + repr(refused.value) + repr(away.value)
