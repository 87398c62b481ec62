"""Discovery on API servers: whatever happens to the connection, in the end it knows what there is."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from contextcache.clock import SystemClock
from contextcache.kubernetes.objects import ENDPOINT_SLICES, PODS
from gateway.metrics import Metrics
from gateway.pods import reflector
from gateway.pods.kubernetes import KubernetesEndpoints, SliceRules, addresses_of, endpoints_of, pod_of
from gateway.pods.state import Endpoint
from tests.kit.kube_objects import SELECTOR, pod_object, slice_entry, slice_object
from tests.kit.kube_servers import SERVERS, emptied_server
from tests.kit.seed import random_of
from tests.kit.until import until

DEADLINE_S = 90
A = Endpoint("a", "http://10.0.0.1:8000", "10.0.0.1:50061")


class Discovery:
    """KubernetesEndpoints and what came of it."""

    def __init__(self, admin, metrics) -> None:
        self.found = KubernetesEndpoints(
            admin,
            namespace=admin.namespace,
            selector=SELECTOR,
            rules=SliceRules(),
            resync_s=3600,
            metrics=metrics,
            clock=SystemClock(),
        )
        self.metrics = metrics

    async def until(self, *expected: Endpoint) -> None:
        def endpoints() -> tuple[Endpoint, ...]:
            self.found.changed()
            return self.found.endpoints

        await until(endpoints, is_so=lambda found: found == expected, what=f"endpoints {expected}")

    async def until_failed(self, resource: str, reason: str, number: int = 1) -> None:
        await until(
            lambda: self.failures(resource, reason),
            is_so=lambda seen: seen >= number,
            what=f"{number} of {reason}",
        )

    def failures(self, resource: str, reason: str) -> float:
        labels = {"resource": resource, "reason": reason}
        name = "contextcache_gateway_discovery_failures_total"
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def discovery_of(admin):
    discovery = Discovery(admin, Metrics(CollectorRegistry()))
    task = asyncio.create_task(discovery.found.run())
    try:
        yield discovery
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Try again at once: how the delays grow is a unit test."""
    for name in ("_DELAY_S", "_REFUSED_DELAY_S"):
        monkeypatch.setattr(reflector, name, 0.02)
    monkeypatch.setattr(reflector, "_DELAY_MAX_S", 0.1)


@pytest.mark.parametrize("kind", SERVERS)
async def test_pods_come_drain_and_go(kind, tmp_path, monkeypatch):
    async with emptied_server(kind, tmp_path, monkeypatch) as (_, admin), discovery_of(admin) as discovery:
        await admin.add(PODS, pod_object("a"))
        await admin.add(ENDPOINT_SLICES, slice_object("s", slice_entry("a", "10.0.0.1")))
        await discovery.until(A)
        await admin.annotate(PODS, "a", annotations={"context-cache.io/drain": "true"})
        await discovery.until(Endpoint("a", A.url, A.sidecar, draining=True))
        await admin.annotate(PODS, "a", annotations={})
        await discovery.until(A)
        await admin.annotate(PODS, "a", finalizers=["context-cache.io/test"])
        await admin.remove(PODS, "a")
        await discovery.until(Endpoint("a", A.url, A.sidecar, draining=True))
        await admin.annotate(PODS, "a", finalizers=[])
        await admin.change(ENDPOINT_SLICES, "s", endpoints=[])
        await discovery.until()


@pytest.mark.parametrize("kind", SERVERS)
async def test_after_two_hundred_slices_churned_the_state_is_what_the_server_has(kind, tmp_path, monkeypatch):
    """With connections broken off and versions forgotten all the while, where the server can be made to."""
    async with emptied_server(kind, tmp_path, monkeypatch) as (kube, admin):
        async with discovery_of(admin) as discovery:
            await churn(admin, kube, random_of("churn"))
            slices, pods = (
                await admin.list(discovery.found._slices._selection),
                await admin.list(discovery.found._pods._selection),
            )
            addresses = [address for each in slices.objects for address in addresses_of(each)]
            by_name = {each["metadata"]["name"]: pod_of(each) for each in pods.objects}
            expected = endpoints_of(addresses, by_name, rules=SliceRules())
            assert len(expected) > 50
            await discovery.until(*expected)
        if kube is not None:
            assert discovery.failures("endpointslices", "expired") > 0
            assert discovery.failures("endpointslices", "unavailable") > 0
            assert discovery.failures("endpointslices", "internal") == 0


async def churn(admin, kube, rng) -> None:
    """Make 200 slices and their pods, and change, remove and remake some 600 times."""
    for number in range(200):
        await admin.add(ENDPOINT_SLICES, slice_object(f"s{number}", entry(number, rng)))
    pods = set()
    for step in range(600):
        number = rng.randrange(200)
        name = f"s{number}"
        match rng.choice(["change", "change", "replace", "unlabel", "pod"]):
            case "change":
                await admin.change(ENDPOINT_SLICES, name, endpoints=[entry(number, rng)])
            case "replace":
                await admin.remove(ENDPOINT_SLICES, name)
                await admin.add(ENDPOINT_SLICES, slice_object(name, entry(number, rng)))
            case "unlabel":
                labels = {} if rng.random() < 0.3 else slice_object(name)["metadata"]["labels"]
                await admin.annotate(ENDPOINT_SLICES, name, labels=labels)
            case "pod":
                pod = f"p{number}"
                await (admin.remove(PODS, pod) if pod in pods else admin.add(PODS, pod_object(pod, sidecar=step % 2)))
                pods ^= {pod}
        if kube is not None and step % 37 == 0:
            kube.disconnect()
        if kube is not None and step % 53 == 0:
            # Whoever is not connected at this moment has missed what went before.
            kube.disconnect()
            await admin.change(ENDPOINT_SLICES, name, endpoints=[entry(number, rng)])
            await kube.forget()
        if kube is not None and step == 300:
            await kube.away()
            await kube.back()
            await admin.until_started()


def entry(number: int, rng: random.Random):
    serving = rng.random() < 0.8
    return slice_entry(f"p{number}", f"10.0.{rng.randrange(250)}.{number}", ready=serving, serving=serving)


async def test_with_the_server_away_the_last_known_pods_stay(kube, fake_admin):
    await fake_admin.add(ENDPOINT_SLICES, slice_object("s", slice_entry("a", "10.0.0.1")))
    async with discovery_of(fake_admin) as discovery:
        await discovery.until(A)
        await kube.away()
        await discovery.until_failed("endpointslices", "unavailable", 5)
        assert discovery.found.changed() is None
        assert discovery.found.endpoints == (A,)
        kube.objects.clear()
        kube.version += 1
        await kube.forget()
        await kube.back()

        await discovery.until()


@pytest.mark.parametrize(
    "answer",
    [
        (200, "<html></html>", "text/html"),
        (200, '{"kind": "Status", "status": "Success"}', "application/json"),
        (200, '{"kind": "EndpointSliceList", "metadata": {"resourceVersion": "1"}}', "application/json"),
    ],
)
async def test_what_is_no_list_removes_nobody(kube, fake_admin, answer):
    await fake_admin.add(ENDPOINT_SLICES, slice_object("s", slice_entry("a", "10.0.0.1")))
    async with discovery_of(fake_admin) as discovery:
        await discovery.until(A)
        kube.answer_with(*answer)
        kube.version += 1
        await kube.forget()
        await discovery.until_failed("endpointslices", "invalid", 3)
        assert discovery.found.changed() is None
        assert discovery.found.endpoints == (A,)
        kube.answer_with()
        await fake_admin.change(ENDPOINT_SLICES, "s", endpoints=[])

        await discovery.until()


async def test_without_the_role_it_waits_for_it_and_says_what_is_missing(kube, fake_admin, caplog):
    kube.allows = lambda verb, _plural, _namespace: verb not in {"list", "watch"}
    await fake_admin.add(ENDPOINT_SLICES, slice_object("s", slice_entry("a", "10.0.0.1")))
    async with discovery_of(fake_admin) as discovery:
        assert not await discovery.found.until_tried(DEADLINE_S)
        await discovery.until_failed("endpointslices", "forbidden", 4)
        kube.allows = lambda *_: True
        await discovery.until(A)

    said = [record for record in caplog.records if record.message.startswith("discovery failed")]
    assert sorted(record.needs_on for record in said) == ["endpointslices of discovery.k8s.io/v1", "pods of v1"]
    assert {record.needs_in for record in said} == {"ns"}


async def test_who_may_list_and_not_watch_lives_by_lists(kube, fake_admin):
    kube.allows = lambda verb, _plural, _namespace: verb != "watch"
    async with discovery_of(fake_admin) as discovery:
        await discovery.until_failed("endpointslices", "forbidden", 2)
        await fake_admin.add(ENDPOINT_SLICES, slice_object("s", slice_entry("a", "10.0.0.1")))

        await discovery.until(A)


async def test_who_may_not_see_pods_has_the_slices(kube, fake_admin):
    kube.allows = lambda verb, plural, _namespace: plural != "pods" or verb == "create"
    await fake_admin.add(ENDPOINT_SLICES, slice_object("s", slice_entry("a", "10.0.0.1", terminating=True)))
    async with discovery_of(fake_admin) as discovery:
        assert await discovery.found.until_tried(DEADLINE_S)

        await discovery.until(Endpoint("a", A.url, A.sidecar, draining=True))
