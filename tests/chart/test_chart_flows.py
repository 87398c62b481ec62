"""The flows that the NetworkPolicies let through, against the table of the design's, both ways, in each mode."""

from __future__ import annotations

import pytest

from tests.chart.flows import Flow, Party, allowed, outside, pod
from tests.chart.manifests import ENGINES, components, name_of, of_kind, one, pods
from tests.chart.releases import (
    ENGINE,
    ENVOY_GATEWAY,
    INFERENCE_POOL,
    INJECTOR,
    NO_ENVOY,
    TLS_SECRET,
    merged,
)
from tests.chart.rendering import Document, Release, render

NAMESPACE = "llm"
INJECT = "context-cache.io/inject"
APP = pod("app", "apps", {"app": "chat"})
NEIGHBOUR = pod("neighbour", NAMESPACE, {"app": "somebody-s-own"})
PROMETHEUS = pod("prometheus", "monitoring", {"app.kubernetes.io/name": "prometheus"})
COLLECTOR = pod("collector", "monitoring", {"app.kubernetes.io/name": "otel"})
DNS = pod("dns", "kube-system", {"k8s-app": "kube-dns"})
PROXY = pod("proxy", "envoy-gateway-system", {"app.kubernetes.io/name": "envoy"})
REDIS = pod("redis", "data", {"app": "redis"})
API_SERVER = outside("api-server", "10.96.0.1")
INTERNET = outside("internet", "203.0.113.7")
WORLD = [APP, NEIGHBOUR, PROMETHEUS, COLLECTOR, DNS, PROXY, REDIS, API_SERVER, INTERNET]
PORTS = [22, 53, 80, 443, 4317, 6379, 6443, 8000, 8010, 8080, 8443, 9002, 9090, 9091, 9901, 50051, 50061]


CLOSED_IN_INJECTED_PODS = {8000, 8010, 9091, 50061}


def of_namespace(name: str) -> dict:
    """Return the peer that is every pod of a namespace."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


NARROW = {
    "networkPolicy": {
        "clients": [of_namespace("apps")],
        "proxies": [of_namespace("envoy-gateway-system")],
        "monitoring": [of_namespace("monitoring")],
        "traceCollectors": [
            {**of_namespace("monitoring"), "podSelector": {"matchLabels": {"app.kubernetes.io/name": "otel"}}}
        ],
        "apiServer": {
            "cidrs": ["10.96.0.1/32"],
            "ports": [443],
            "webhookClients": [{"ipBlock": {"cidr": "10.96.0.1/32"}}],
        },
        "modelDownload": {"enabled": False},
        "injectedPods": {"restrictHttp": True},
    },
    "tracing": {"endpoint": "http://otel.monitoring.svc:4317"},
    "redis": {"url": "redis://redis.data.svc:6379/0", "egress": {"to": [of_namespace("data")]}},
}
OWN_POLICIES = {"networkPolicy": {"injectedPods": {"ownPolicies": True}}}
OWN_REDIS = {"redis": {"url": ""}}

ALWAYS: set[Flow] = {
    ("gateway", "context-manager", 50051),
    ("gateway", "api-server", 443),
    *(("gateway", pod, port) for pod in ("engine", "injected") for port in (8000, 8010, 50061)),
    ("engine", "context-manager", 50051),
    *(("engine", "injected", port) for port in (8000, 50061)),
    ("injected", "context-manager", 50051),
    *(("injected", "engine", port) for port in (8000, 50061)),
    ("api-server", "injector", 8443),
    *((part, "dns", 53) for part in ("gateway", "context-manager", "engine")),
    *((part, "collector", 4317) for part in ("gateway", "context-manager", "engine")),
    *(("prometheus", part, 9090) for part in ("gateway", "context-manager", "injector")),
    *(("collector", part, 9090) for part in ("gateway", "context-manager", "injector")),
    *(
        (peer, part, port)
        for peer in ("prometheus", "collector")
        for part in ("engine", "injected")
        for port in (8000, 8010, 9091)
    ),
}
"""The flows of every mode."""
EXTERNAL_REDIS = {("context-manager", "redis", 6379)}
VALKEY = {("context-manager", "valkey", 6379)}
BEHIND_ENVOY: set[Flow] = {
    ("app", "envoy", 8080),
    ("test", "envoy", 8080),
    ("test", "dns", 53),
    ("envoy", "gateway", 8000),
    ("envoy", "gateway", 9002),
    *(("envoy", pod, port) for pod in ("engine", "injected") for port in (8000, 8010)),
    ("envoy", "dns", 53),
    ("envoy", "collector", 4317),
    ("prometheus", "envoy", 9090),
    ("collector", "envoy", 9090),
}
BEHIND_ANOTHER_ENVOY: set[Flow] = {
    ("proxy", "gateway", 8000),
    ("proxy", "gateway", 9002),
    ("proxy", "engine", 8010),
    ("proxy", "injected", 8010),
    ("test", "gateway", 8000),
    ("test", "dns", 53),
}
AT_THE_GATEWAY: set[Flow] = {("app", "gateway", 8000), ("test", "gateway", 8000), ("test", "dns", 53)}

EXPECTED = {
    "proxy": ({}, EXTERNAL_REDIS | BEHIND_ENVOY),
    "proxy, mutual tls": (TLS_SECRET, EXTERNAL_REDIS | BEHIND_ENVOY),
    "proxy, valkey": (OWN_REDIS, VALKEY | BEHIND_ENVOY),
    "proxy, https for clients": (
        {"envoy": {"tls": {"existingSecret": "front-tls"}}},
        EXTERNAL_REDIS
        | {flow for flow in BEHIND_ENVOY if flow[1:] != ("envoy", 8080)}
        | {("app", "envoy", 8443), ("test", "envoy", 8443)},
    ),
    "envoy gateway": (ENVOY_GATEWAY, EXTERNAL_REDIS | BEHIND_ANOTHER_ENVOY),
    "inference pool": (INFERENCE_POOL, EXTERNAL_REDIS | BEHIND_ANOTHER_ENVOY),
    "none": (NO_ENVOY, EXTERNAL_REDIS | AT_THE_GATEWAY),
}


def parties(documents: list[Document]) -> list[Party]:
    """Return the pods of a release, and one of somebody else's with an injected sidecar."""
    fullname = name_of(one(documents, "Service", "-engines")).removesuffix("-engines")
    ports = next((made.ports for made in pods(documents) if made.component == "engine"), {})
    own = [pod(made.component, NAMESPACE, made.labels, made.ports) for made in pods(documents)]
    return [*own, pod("injected", NAMESPACE, {"app": "their-vllm", ENGINES: fullname, INJECT: "true"}, ports)]


def flows(values: dict) -> set[Flow]:
    """Return what passes between the parts, and between them and the world; not what others do among themselves."""
    documents = render(Release(values, namespace=NAMESPACE))
    own = parties(documents)
    found = allowed(documents, namespace=NAMESPACE, callers=[*own, *WORLD], called=[*own, *WORLD], ports=PORTS)
    names, theirs = {party.name for party in own}, {party.name for party in WORLD}
    return {
        (caller, called, port)
        for caller, called, port in found
        if caller in names - {"injected"} or (called in names and (caller, called) != ("injected", "injected"))
        if not (caller in theirs and called in theirs)
        # Other ports of somebody else's pods are not ours to close.
        if called != "injected" or port in CLOSED_IN_INJECTED_PODS
    }


@pytest.mark.parametrize("mode", EXPECTED)
def test_exactly_the_flows_of_the_design_pass(mode):
    values, expected = EXPECTED[mode]
    found = flows(merged(NARROW, ENGINE, INJECTOR, values))

    assert sorted(found - ALWAYS - expected) == [], "passes, and must not"
    assert sorted((ALWAYS | expected) - found) == [], "must pass, and does not"


def test_by_default_nobody_outside_reaches_more_than_the_front_and_the_metrics():
    documents = render(Release(merged({"redis": NARROW["redis"]}, ENGINE, INJECTOR), namespace=NAMESPACE))
    own = parties(documents)
    reached = {
        (called, port)
        for _, called, port in allowed(
            documents, namespace=NAMESPACE, callers=[APP, NEIGHBOUR, INTERNET], called=own, ports=PORTS
        )
        if called != "injected"
    }
    metrics = {(part, 9090) for part in ("gateway", "context-manager", "envoy", "injector")} | {("engine", 9091)}

    assert reached - metrics == {("envoy", 8080), ("injector", 8443)}


def test_somebody_else_s_pods_keep_their_own_traffic_by_default():
    """An injected pod loses nothing but strangers at its sidecar's ports."""
    values = merged({"redis": NARROW["redis"]}, INJECTOR)
    documents = render(Release(values, namespace=NAMESPACE))
    injected = parties(documents)[-1]
    out = allowed(documents, namespace=NAMESPACE, callers=[injected], called=WORLD, ports=[22, 443])
    into = allowed(documents, namespace=NAMESPACE, callers=[APP], called=[injected], ports=[8000, 8010, 50061])

    assert {flow[1] for flow in out} == {party.name for party in WORLD}
    assert into == {("app", "injected", 8000)}


def test_where_the_owner_s_policies_decide_ours_opens_nothing_for_strangers():
    """Policies add up: seen opening every port of a pod whose owner had closed them."""
    documents = render(Release(merged({"redis": NARROW["redis"]}, INJECTOR, OWN_POLICIES), namespace=NAMESPACE))
    injected = parties(documents)[-1]
    into = allowed(documents, namespace=NAMESPACE, callers=[APP], called=[injected], ports=[22, 8000, 8010, 50061])
    own = [party for party in parties(documents) if party.name == "gateway"]

    assert into == set()
    assert allowed(documents, namespace=NAMESPACE, callers=own, called=[injected], ports=[8000, 8010, 50061]) == {
        ("gateway", "injected", port) for port in (8000, 8010, 50061)
    }


def test_only_the_gateway_asks_the_kubernetes_api():
    found = flows(merged(NARROW, ENGINE, INJECTOR))

    assert {flow[0] for flow in found if flow[1] == "api-server"} == {"gateway"}


def test_peers_apart_reach_no_other_sidecar():
    found = flows(merged(NARROW, ENGINE, INJECTOR, {"sidecar": {"peers": False}}))

    assert not {flow for flow in found if flow[0] in {"engine", "injected"} and flow[2] == 50061}


@pytest.mark.parametrize(
    ("redis", "ports"),
    [
        ({"url": "rediss://redis.data.svc:6380/0"}, {6380}),
        ({"url": "redis://redis.data.svc/0"}, {6379}),
        ({"url": "redis://[fd00::5]:7000"}, {7000}),
        ({"url": "", "existingSecret": "redis"}, {6379}),
        ({"url": "redis://redis.data.svc:80/0", "egress": {"port": 6379}}, {6379}),
        ({"url": "redis+sentinel://s1:26379,s2,s3:26380/primary"}, {26379, 26380, 6379}),
        ({"url": "redis+sentinel://s1/primary", "egress": {"port": 6390}}, {26379, 6390}),
    ],
)
def test_the_store_is_reached_on_the_port_that_its_address_names(redis, ports):
    policy = one(render(Release({"redis": redis})), "NetworkPolicy", "-manager")
    opened = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}

    assert opened - {53, 5353} == ports


def test_a_model_may_be_fetched_by_the_engine_alone():
    values = merged(NARROW, ENGINE, INJECTOR, {"networkPolicy": {"modelDownload": {"enabled": True}}})
    found = flows(values) - flows(merged(NARROW, ENGINE, INJECTOR))

    assert ("engine", "internet", 443) in found
    assert {(flow[0], flow[2]) for flow in found} == {("engine", 443)}


def test_every_component_has_a_policy_of_both_ways():
    documents = render(Release(merged(NARROW, ENGINE, INJECTOR, OWN_REDIS), namespace=NAMESPACE))
    covered = set()
    for made in pods(documents):
        for policy in of_kind(documents, "NetworkPolicy"):
            if set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"} and set(
                policy["spec"]["podSelector"].get("matchLabels", {}).items()
            ) <= set(made.labels.items()):
                covered.add(made.component)

    assert components(documents) | {"test"} == covered | ({"test"} - {made.component for made in pods(documents)})


def test_without_network_policies_there_are_none():
    values = merged(NARROW, {"networkPolicy": {"enabled": False}})

    assert of_kind(render(Release(values)), "NetworkPolicy") == []
