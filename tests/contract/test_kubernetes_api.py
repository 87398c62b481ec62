"""The client and API servers, the fake and real ones: what both must do for discovery to be right."""

from __future__ import annotations

import asyncio

import pytest

from contextcache.kubernetes.objects import (
    ENDPOINT_SLICES,
    PODS,
    KubernetesAnswerInvalid,
    KubernetesExpired,
    KubernetesForbidden,
    KubernetesUnauthorized,
    KubernetesUnavailable,
    Selection,
)
from tests.kit.fake_kube import FakeKube
from tests.kit.kube_objects import DEADLINE_S, LABELS, SELECTOR, KubeAdmin, pod_object, slice_entry, slice_object
from tests.kit.kube_servers import SERVERS, client_of, emptied_server


@pytest.fixture(params=SERVERS)
async def admin(request, tmp_path, monkeypatch):
    async with emptied_server(request.param, tmp_path, monkeypatch) as (_, admin):
        yield admin


def slices_of(admin: KubeAdmin) -> Selection:
    return Selection(ENDPOINT_SLICES, admin.namespace, SELECTOR)


async def events_of(admin: KubeAdmin, resource_version: str, number: int, *, timeout_s: float = DEADLINE_S):
    """Watch until so many changes have come."""
    found = []
    async with admin.watch(slices_of(admin), resource_version=resource_version, timeout_s=timeout_s) as events:
        async for event in events:
            if event.type != "BOOKMARK":
                found.append((event.type, event.object["metadata"]["name"]))
            if len(found) == number:
                break
    return found


async def test_a_list_holds_what_the_selector_chooses(admin):
    await admin.add(ENDPOINT_SLICES, slice_object("ours", slice_entry("a", "10.0.0.1")))
    await admin.add(ENDPOINT_SLICES, slice_object("another", labels={"context-cache.io/engines": "other"}))
    await admin.add(ENDPOINT_SLICES, slice_object("nobodys", labels={}))

    found = await admin.list(slices_of(admin))

    assert [each["metadata"]["name"] for each in found.objects] == ["ours"]
    assert found.objects[0]["endpoints"][0]["addresses"] == ["10.0.0.1"]


async def test_a_watch_tells_of_every_change_after_a_list_as_the_selector_sees_it(admin):
    await admin.add(ENDPOINT_SLICES, slice_object("before"))
    version = (await admin.list(slices_of(admin))).resource_version

    await admin.add(ENDPOINT_SLICES, slice_object("a"))
    await admin.add(ENDPOINT_SLICES, slice_object("b", labels={}))
    await admin.change(ENDPOINT_SLICES, "a", endpoints=[slice_entry("p", "10.0.0.1")])
    await admin.annotate(ENDPOINT_SLICES, "b", labels=LABELS)
    await admin.annotate(ENDPOINT_SLICES, "a", labels={})
    await admin.remove(ENDPOINT_SLICES, "before")
    found = await events_of(admin, version, 5)

    assert found == [("ADDED", "a"), ("MODIFIED", "a"), ("ADDED", "b"), ("DELETED", "a"), ("DELETED", "before")]


async def test_a_watch_goes_on_from_the_event_before(admin):
    version = (await admin.list(slices_of(admin))).resource_version
    first = await admin.add(ENDPOINT_SLICES, slice_object("a"))
    await admin.add(ENDPOINT_SLICES, slice_object("b"))

    assert await events_of(admin, version, 2) == [("ADDED", "a"), ("ADDED", "b")]
    assert await events_of(admin, first["metadata"]["resourceVersion"], 1) == [("ADDED", "b")]


async def test_a_watch_ends_when_its_time_is_over(admin):
    version = (await admin.list(slices_of(admin))).resource_version

    async with asyncio.timeout(DEADLINE_S):
        assert await events_of(admin, version, 1, timeout_s=1) == []


async def test_a_deleted_pod_with_a_finalizer_is_shown_as_ending_first(admin):
    pods = Selection(PODS, admin.namespace, SELECTOR)
    body = pod_object("p")
    body["metadata"]["finalizers"] = ["context-cache.io/test"]
    await admin.add(PODS, body)
    await admin.remove(PODS, "p")
    (ending,) = (await admin.list(pods)).objects
    assert ending["metadata"]["deletionTimestamp"]
    assert ending["spec"]["initContainers"][0]["name"] == "kv-sidecar"
    await admin.annotate(PODS, "p", finalizers=[])

    assert (await admin.list(pods)).objects == ()


async def test_a_list_of_many_pages_is_one_state(kube, fake_admin):
    kube.page_objects = 3
    for number in range(10):
        await fake_admin.add(ENDPOINT_SLICES, slice_object(f"s{number}"))

    found = await fake_admin.list(slices_of(fake_admin))

    assert [each["metadata"]["name"] for each in found.objects] == [f"s{number}" for number in range(10)]
    assert found.resource_version == str(kube.version)
    assert kube.requests.count(("list", "endpointslices")) == 4


async def test_a_forgotten_version_is_expired(kube, fake_admin):
    version = (await fake_admin.list(slices_of(fake_admin))).resource_version
    await fake_admin.add(ENDPOINT_SLICES, slice_object("a"))
    await kube.forget()

    with pytest.raises(KubernetesExpired):
        await events_of(fake_admin, version, 1)


@pytest.mark.parametrize(
    ("status", "body", "content_type", "error"),
    [
        (200, "<html>Sign in</html>", "text/html", KubernetesAnswerInvalid),
        (200, "{}", "application/json", KubernetesAnswerInvalid),
        (200, "[]", "application/json", KubernetesAnswerInvalid),
        (200, '{"kind": "PodList", "items": [], "metadata": {"resourceVersion": "1"}}', "application/json",
         KubernetesAnswerInvalid),
        (200, '{"kind": "EndpointSliceList", "items": []}', "application/json", KubernetesAnswerInvalid),
        (200, '{"kind": "EndpointSliceList", "items": {}, "metadata": {"resourceVersion": "1"}}', "application/json",
         KubernetesAnswerInvalid),
        (429, "slow down", "text/plain", KubernetesUnavailable),
        (500, "{", "application/json", KubernetesUnavailable),
        (503, '{"kind": "Status", "message": "starting"}', "application/json", KubernetesUnavailable),
    ],
)  # fmt: skip
async def test_what_is_no_list_is_an_error(kube, fake_admin, status, body, content_type, error):
    kube.answer_with(status, body, content_type)

    with pytest.raises(error):
        await fake_admin.list(slices_of(fake_admin))


async def test_a_role_without_the_verb_is_forbidden_and_says_which(kube, fake_admin):
    kube.allows = lambda verb, plural, _namespace: (verb, plural) != ("list", "endpointslices")

    with pytest.raises(KubernetesForbidden, match='cannot list resource "endpointslices"'):
        await fake_admin.list(slices_of(fake_admin))
    await fake_admin.add(ENDPOINT_SLICES, slice_object("a"))


async def test_a_server_that_is_away_is_unavailable_and_may_come_back(kube, fake_admin):
    await kube.away()
    with pytest.raises(KubernetesUnavailable):
        await fake_admin.list(slices_of(fake_admin))
    await kube.back()
    with pytest.raises(KubernetesForbidden):
        await fake_admin.list(slices_of(fake_admin))
    await fake_admin.until_started()

    assert (await fake_admin.list(slices_of(fake_admin))).objects == ()


async def test_a_watch_broken_off_is_no_end(kube, fake_admin):
    version = (await fake_admin.list(slices_of(fake_admin))).resource_version

    async def watch_until_it_ends():
        async with fake_admin.watch(slices_of(fake_admin), resource_version=version, timeout_s=DEADLINE_S) as events:
            async for _ in events:
                kube.disconnect()

    with pytest.raises(KubernetesUnavailable):
        await watch_until_it_ends()


async def test_a_server_that_says_nothing_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("contextcache.kubernetes.client._LIST_S", 0.2)
    held = asyncio.Event()

    async def say_nothing(reader, writer):
        await held.wait()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    kube = FakeKube(port=silent.sockets[0].getsockname()[1])
    admin = client_of(kube.write_kubeconfig(tmp_path / "kubeconfig"), monkeypatch)

    with pytest.raises(KubernetesUnavailable):
        async with asyncio.timeout(DEADLINE_S):
            await admin.list(slices_of(admin))
    held.set()
    await admin.close()
    silent.close()


async def test_credentials_are_read_again_when_they_are_refused(kube, tmp_path, monkeypatch):
    kubeconfig = kube.write_kubeconfig(tmp_path / "kubeconfig")
    admin = client_of(kubeconfig, monkeypatch)
    await admin.list(slices_of(admin))
    kube.token = "the-next-one"
    with pytest.raises(KubernetesUnauthorized):
        await admin.list(slices_of(admin))
    kube.write_kubeconfig(kubeconfig)

    assert (await admin.list(slices_of(admin))).objects == ()
    await admin.close()


def test_without_a_cluster_there_is_nobody_to_ask(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no Kubernetes API server configured"):
        client_of(tmp_path / "none", monkeypatch)
