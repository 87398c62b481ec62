"""`python -m gateway` with its pods from an API server: the whole process, as in a cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from contextcache.kubernetes.objects import ENDPOINT_SLICES, PODS
from gateway.app import _listed_endpoints
from gateway.metrics import Metrics
from gateway.pods.state import Endpoint
from tests.kit.fake_kube import FakeKube
from tests.kit.gateway_parts import KEY
from tests.kit.gateway_process import START_DEADLINE_S, GatewayProcess
from tests.kit.gateway_server import DEADLINE_S, settings_for
from tests.kit.kube_objects import SELECTOR, pod_object, slice_entry, slice_object
from tests.kit.kube_servers import client_of
from tests.kit.stub_engine import StubEngine
from tests.kit.until import until


@pytest.fixture
async def kube():
    async with FakeKube() as kube:
        yield kube


@pytest.fixture
async def admin(kube, tmp_path, monkeypatch):
    admin = client_of(kube.write_kubeconfig(tmp_path / "kubeconfig"), monkeypatch)
    yield admin
    await admin.close()


@pytest.fixture
async def engines(admin):
    """Two pods on 127.0.0.1; each port needs a slice of its own."""
    engines = {name: StubEngine() for name in ("pod-a", "pod-b")}
    for name, engine in engines.items():
        await engine.start()
        await admin.add(PODS, pod_object(name, sidecar=False))
        await admin.add(ENDPOINT_SLICES, slice_object(name, slice_entry(name, "127.0.0.1"), port=engine.port))
    yield engines
    for engine in engines.values():
        await engine.stop()


@pytest.fixture
async def gateway(tmp_path, engines, manager):
    settings = settings_for(tmp_path, engines, manager_port=manager.port)
    process = GatewayProcess(tmp_path, settings)
    del process._environment["GATEWAY_ENDPOINTS"]
    process._environment["GATEWAY_KUBERNETES_SERVICE_SELECTOR"] = SELECTOR
    process._environment["KUBECONFIG"] = str(tmp_path / "kubeconfig")
    await process.start()
    yield process
    await process.stop()


async def endpoints(gateway) -> dict:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.get(f"http://127.0.0.1:{gateway.metrics_port}/readyz") as answer,
    ):
        return (await answer.json())["endpoints"]


async def until_pods(gateway, condition):
    await until(lambda: endpoints(gateway), is_so=condition, what="pods as they should be")


async def ask(gateway, num_requests) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
        for _ in range(num_requests):
            url = f"http://127.0.0.1:{gateway.http_port}/v1/completions"
            async with http.post(url, json={"prompt": "x"}) as answer:
                assert answer.status == 200, await answer.text()


def num_asked(engine) -> int:
    return sum(received.target == "/v1/completions" for received in engine.received)


async def test_a_gateway_serves_the_pods_the_cluster_has(gateway, engines, kube, admin):
    await until_pods(gateway, lambda pods: len(pods) == 2 and all(pod["ready"] for pod in pods.values()))
    await ask(gateway, 6)
    assert all(num_asked(engine) for engine in engines.values())

    await admin.annotate(PODS, "pod-a", annotations={"context-cache.io/drain": "true"})
    await until_pods(gateway, lambda pods: pods["pod-a"]["draining"])
    before = num_asked(engines["pod-a"])
    await ask(gateway, 6)
    assert num_asked(engines["pod-a"]) == before

    await kube.away()
    await ask(gateway, 6)
    await kube.back()

    await admin.until_started()
    await admin.remove(ENDPOINT_SLICES, "pod-a")
    await until_pods(gateway, lambda pods: set(pods) == {"pod-b"})
    await ask(gateway, 2)


@pytest.mark.thorough
async def test_a_gateway_started_without_the_api_server_serves_once_it_is_there(tmp_path, kube, engines, manager):
    await kube.away()
    process = GatewayProcess(tmp_path, settings_for(tmp_path, engines, manager_port=manager.port))
    del process._environment["GATEWAY_ENDPOINTS"]
    process._environment["GATEWAY_KUBERNETES_SERVICE_SELECTOR"] = SELECTOR
    process._environment["KUBECONFIG"] = str(tmp_path / "kubeconfig")
    starting = asyncio.create_task(process.start())
    try:
        # It lives, and says that it has no pods.
        found = await until(
            lambda: endpoints(process),
            is_so=lambda _: True,
            what="it answers",
            deadline_s=START_DEADLINE_S,
            despite=(aiohttp.ClientError,),
        )
        assert found == {}
        await kube.back()
        await starting
        await ask(process, 2)
    finally:
        starting.cancel()
        await asyncio.wait([starting])
        await process.stop()


async def test_where_pods_are_looked_for_is_the_operators_to_say(tmp_path, kube, admin):
    admin.namespace = "engines"
    pod = pod_object("pod-a")
    pod["spec"]["containers"].append({"name": "turn", "image": "cc:1"})
    await admin.add(PODS, pod)
    slices = slice_object("a", slice_entry("pod-a", "10.0.0.1"), port_name="api", sidecar_port_name="kv")
    slices["ports"].append({"name": "turns", "port": 8010, "protocol": "TCP"})
    await admin.add(ENDPOINT_SLICES, slices)
    asked = Counter()
    kube.allows = lambda *what: asked.update([what]) is None
    given = {
        "kubernetes_service_selector": SELECTOR,
        "kubernetes_namespace": "engines",
        "kubernetes_port_name": "api",
        "kubernetes_sidecar_port_name": "kv",
        "kubernetes_turn_port_name": "turns",
        "kubernetes_scheme": "https",
    }
    settings = settings_for(tmp_path, {}, manager_port=1, **given)
    async with AsyncExitStack() as stack:
        endpoints, _ = await _listed_endpoints(settings, stack, Metrics(CollectorRegistry()))

    told = Endpoint("pod-a", "https://10.0.0.1:8000", "10.0.0.1:50061", turn_url="https://10.0.0.1:8010")
    assert endpoints == (told,)
    assert {namespace for _, _, namespace in asked} == {"engines"}
