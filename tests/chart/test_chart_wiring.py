"""What is named in one place exists in the other: selectors, ports, probes, volumes, secrets, accounts."""

from __future__ import annotations

import itertools
import re

from tests.chart.each_release import in_each_release
from tests.chart.manifests import (
    COMPONENT,
    ENGINES,
    SELECTORS,
    components,
    env_of,
    identity,
    matches,
    name_of,
    of_kind,
    one,
    pod_of,
    pods,
    selects,
)
from tests.chart.releases import ENGINE, INJECTOR, REDIS, RELEASES, merged
from tests.chart.rendering import Release, render

WORKLOADS = ("Deployment", "StatefulSet")
FROM_OUTSIDE = {
    "redis",
    "redis-tls",
    "parts-tls",
    "front-tls",
    "keys",
    "sign",
    "hf",
    "webhook-tls",
}
"""Secrets that these releases say exist already."""


@in_each_release
def test_workloads_select_their_own_pods_by_the_three_labels_that_never_change(documents):
    for workload in of_kind(documents, *WORKLOADS):
        selector = workload["spec"]["selector"]["matchLabels"]

        assert sorted(selector) == sorted(SELECTORS), identity(workload)
        assert selects(selector, workload["spec"]["template"]["metadata"]["labels"]), identity(workload)


@in_each_release
def test_no_workload_selects_another_s_pods(documents):
    for workload in of_kind(documents, *WORKLOADS):
        selector = workload["spec"]["selector"]["matchLabels"]
        selected = {pod.owner for pod in pods(documents) if selects(selector, pod.labels)}

        assert selected == {"/".join(identity(workload))}


def test_two_releases_touch_nothing_of_each_other():
    """Of two names, in one namespace: objects, selectors of every kind, and the label that engines are found by."""
    values = RELEASES["everything"].values
    one_, other = (render(Release(values, name=name)) for name in ("a", "ab"))

    assert not {identity(document) for document in one_} & {identity(document) for document in other}
    for mine, theirs in ((one_, other), (other, one_)):
        foreign = list(pods(theirs))
        for document in mine:
            for selector in selectors(document):
                assert not [pod.owner for pod in foreign if matches(selector, pod.labels)], identity(document)


def selectors(document):
    """Return the LabelSelectors by which an object takes pods of its release."""
    spec = document.get("spec", {})
    match document["kind"]:
        case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
            yield spec["selector"]
        case "Service":
            yield {"matchLabels": spec["selector"]}
        case "NetworkPolicy":
            yield spec["podSelector"]
        case "PodMonitor" | "InferencePool":
            yield spec["selector"]


@in_each_release
def test_every_selector_finds_pods_when_there_are_any(documents):
    present = list(pods(documents))
    for document in documents:
        for selector in selectors(document):
            labels = selector.get("matchLabels", {})
            optional = (
                ENGINES in labels or labels.get(COMPONENT) in {None, "engine", "test"} or "matchExpressions" in selector
            )

            assert optional or any(matches(selector, pod.labels) for pod in present), identity(document)


@in_each_release
def test_services_lead_to_ports_that_their_pods_have(documents):
    for service in of_kind(documents, "Service"):
        found = [pod for pod in pods(documents) if selects(service["spec"]["selector"], pod.labels)]
        for pod, port in itertools.product(found, service["spec"]["ports"]):
            target = port.get("targetPort", port["port"])
            known = pod.ports.keys() if isinstance(target, str) else pod.ports.values()

            assert target in known, (identity(service), pod.owner, target)


@in_each_release
def test_every_port_of_a_service_says_its_protocol(documents):
    """A mesh takes a port without one for TCP, and then balances no gRPC call."""
    for service in of_kind(documents, "Service"):
        for port in service["spec"]["ports"]:
            named = port["name"].partition("-")[0]

            assert "appProtocol" in port or named in {"http", "https", "grpc", "redis"}, (identity(service), port)


@in_each_release
def test_no_two_containers_of_a_pod_want_the_same_port_or_port_name(documents):
    for pod in pods(documents):
        wanted = [port for container in pod.running for port in container.get("ports", [])]
        for field in ("name", "containerPort"):
            values = [port[field] for port in wanted]

            assert sorted(set(values), key=str) == sorted(values, key=str), pod.owner


@in_each_release
def test_probes_ask_a_port_of_their_own_container(documents):
    for pod in pods(documents):
        for container in pod.running:
            own = {}
            for port in container.get("ports", []):
                own |= {port["name"]: port, port["containerPort"]: port}
            for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
                probe = container.get(kind, {})
                for way in ("httpGet", "tcpSocket", "grpc"):
                    if way in probe:
                        assert probe[way]["port"] in own, (pod.owner, container["name"], kind)


@in_each_release
def test_whatever_stays_is_probed(documents):
    for pod in pods(documents):
        if pod.owner.startswith("Job/"):
            continue
        for container in pod.spec["containers"]:
            # The attendant of Envoy answers nobody; it ends when it cannot go on.
            if container["name"] != "attendant":
                assert {"livenessProbe", "readinessProbe"} <= container.keys(), (pod.owner, container["name"])
        for container in pod.native_sidecars:
            assert "startupProbe" in container, (pod.owner, container["name"])


@in_each_release
def test_every_mount_has_its_volume_and_every_volume_is_mounted(documents):
    for document in of_kind(documents, *WORKLOADS, "Job"):
        for pod in pods([document]):
            mounted = {mount["name"] for container in pod.containers for mount in container.get("volumeMounts", [])}
            volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
            claims = {claim["metadata"]["name"] for claim in document.get("spec", {}).get("volumeClaimTemplates", [])}

            assert mounted == volumes | claims, pod.owner


@in_each_release
def test_no_two_mounts_of_a_container_have_the_same_path(documents):
    for pod in pods(documents):
        for container in pod.containers:
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]

            assert sorted(set(paths)) == sorted(paths), (pod.owner, container["name"])


@in_each_release
def test_settings_that_are_files_are_mounted_where_they_are_said_to_be(documents):
    for pod in pods(documents):
        for container in pod.containers:
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            for name, value in env_of(container).items():
                if name.startswith("ENVOY_"):  # what Envoy beside it reads
                    paths += [mount["mountPath"] for one in pod.running for mount in one["volumeMounts"]]
                if name.endswith(("_FILE", "_DIR", "_SOCKET")) and isinstance(value, str) and value.startswith("/"):
                    assert any(value == path or value.startswith(f"{path}/") for path in paths), (pod.owner, name)


@in_each_release
def test_no_variable_is_given_twice(documents):
    for pod in pods(documents):
        for container in pod.containers:
            names = [item["name"] for item in container.get("env", [])]

            assert sorted(set(names)) == sorted(names), (pod.owner, container["name"])


@in_each_release
def test_secrets_config_maps_and_keys_that_are_used_exist(documents):
    there = {identity(document): set(contents(document)) for document in documents}
    made = {one["spec"]["secretName"] for one in of_kind(documents, "Certificate")}
    for pod in pods(documents):
        for kind, name, keys in references(pod):
            if (kind, name) in there:
                assert keys <= there[kind, name], (pod.owner, kind, name)
            else:
                assert kind == "Secret", (pod.owner, name)
                assert name in FROM_OUTSIDE | made, (pod.owner, name)


def contents(document):
    """Return the keys of a Secret or ConfigMap."""
    return [*document.get("data", {}), *document.get("stringData", {})]


def references(pod):
    """Return kind, name and keys of the Secrets and ConfigMaps that a pod uses."""
    for volume in pod.spec.get("volumes", []):
        for kind, field, name in (("Secret", "secret", "secretName"), ("ConfigMap", "configMap", "name")):
            if field in volume and not volume[field].get("optional"):
                yield kind, volume[field][name], {item["key"] for item in volume[field].get("items", [])}
    for container in pod.containers:
        for value in env_of(container).values():
            if isinstance(value, dict) and "secretKeyRef" in value:
                yield "Secret", value["secretKeyRef"]["name"], {value["secretKeyRef"]["key"]}


@in_each_release
def test_service_accounts_are_made_or_the_namespace_s_own(documents):
    made = {name_of(account) for account in of_kind(documents, "ServiceAccount")}
    for pod in pods(documents):
        named = pod.spec.get("serviceAccountName")

        assert not made or named is None or named in made, pod.owner


@in_each_release
def test_addresses_in_settings_name_services_and_ports_of_this_release(release, documents):
    services = {name_of(service): service for service in of_kind(documents, "Service")}
    domain = f".{release.namespace}.svc.{release.values.get('clusterDomain', 'cluster.local')}"
    seen = 0
    for pod in pods(documents):
        for container in pod.containers:
            for name, value in env_of(container).items():
                for host, port in re.findall(rf"([\w-]+){re.escape(domain)}\.?:(\d+)", str(value)):
                    service = services[host]
                    found = [other for other in pods(documents) if selects(service["spec"]["selector"], other.labels)]
                    numbers = {other["port"] for other in service["spec"]["ports"]}

                    assert int(port) in numbers, (pod.owner, name, value)
                    assert service["spec"].get("clusterIP") != "None" or all(
                        int(port) in other.ports.values() for other in found
                    ), (pod.owner, name, value)
                    seen += 1
    assert seen >= 1


@in_each_release
def test_disruption_budgets_are_for_the_pods_of_their_component_and_let_sick_ones_go(documents):
    for budget in of_kind(documents, "PodDisruptionBudget"):
        component = budget["metadata"]["labels"][COMPONENT]

        assert matches(budget["spec"]["selector"], pod_of(documents, component).labels)
        assert [pod.owner for pod in pods(documents) if matches(budget["spec"]["selector"], pod.labels)] == [
            pod_of(documents, component).owner
        ]
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_every_component_of_more_than_one_pod_has_a_budget():
    documents = render(RELEASES["everything"])
    covered = {budget["metadata"]["labels"][COMPONENT] for budget in of_kind(documents, "PodDisruptionBudget")}

    assert covered == components(documents) - {"valkey"}


@in_each_release
def test_whoever_is_scaled_by_somebody_else_has_no_number_of_replicas(documents):
    scaled = {scaler["spec"]["scaleTargetRef"]["name"] for scaler in of_kind(documents, "HorizontalPodAutoscaler")}
    scaled |= {scaler["spec"]["scaleTargetRef"]["name"] for scaler in of_kind(documents, "ScaledObject")}
    for deployment in of_kind(documents, "Deployment"):
        assert ("replicas" in deployment["spec"]) != (name_of(deployment) in scaled), identity(deployment)
    assert scaled <= {name_of(deployment) for deployment in of_kind(documents, "Deployment")}


@in_each_release
def test_a_rollout_of_what_serves_takes_nobody_away_first(documents):
    for deployment in of_kind(documents, "Deployment"):
        if deployment["metadata"]["labels"][COMPONENT] in {"gateway", "context-manager", "envoy", "injector"}:
            update = deployment["spec"]["strategy"]["rollingUpdate"]

            assert update["maxUnavailable"] == 0, identity(deployment)


def test_pod_monitors_find_every_port_with_metrics():
    documents = render(RELEASES["monitoring"])
    scraped = set()
    for monitor in of_kind(documents, "PodMonitor"):
        found = [pod for pod in pods(documents) if matches(monitor["spec"]["selector"], pod.labels)]
        for pod, endpoint in itertools.product(found, monitor["spec"]["podMetricsEndpoints"]):
            if endpoint["port"] in pod.ports:
                scraped.add((pod.component, asked_port(endpoint, pod.ports), endpoint["path"]))

    assert scraped == {
        ("gateway", 9090, "/metrics"),
        ("context-manager", 9090, "/metrics"),
        ("envoy", 9090, "/stats/prometheus"),
        ("injector", 9090, "/metrics"),
        ("engine", 8000, "/metrics"),
        ("engine", 8010, "/metrics"),
        ("engine", 9091, "/metrics"),
    }


def asked_port(endpoint, ports):
    """Return the port that Prometheus asks, after what an endpoint says about the address."""
    for change in endpoint.get("relabelings", []):
        if change.get("targetLabel") == "__address__":
            return int(change["replacement"].rpartition(":")[2])
    return ports[endpoint["port"]]


def test_engines_are_found_by_one_label_that_their_service_carries_too():
    documents = render(Release(merged(REDIS, ENGINE, INJECTOR)))
    service = one(documents, "Service", "-engines")
    label = {ENGINES: name_of(service).removesuffix("-engines")}
    selector = env_of(pod_of(documents, "gateway").containers[-1])["GATEWAY_KUBERNETES_SERVICE_SELECTOR"]

    assert service["spec"]["selector"] == label
    assert label.items() <= service["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None"
    assert not service["spec"].get("publishNotReadyAddresses")
    assert label.items() <= pod_of(documents, "engine").labels.items()
    assert dict(item.split("=") for item in selector.split(",")) == label
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == {
        "http": 8000,
        "turn": 8010,
        "kv-grpc": 50061,
    }


def test_the_engines_service_is_there_without_the_chart_s_own_engine():
    documents = render(RELEASES["defaults"])

    assert "engine" not in components(documents)
    assert one(documents, "Service", "-engines")


@in_each_release
def test_times_to_end_fit_into_one_another(documents):
    """A pod is killed after its grace period: what it needs to leave in peace must be shorter."""
    for pod in pods(documents):
        if pod.component in {"gateway", "engine", "envoy"} and not pod.owner.startswith("Job/"):
            grace_s = pod.spec["terminationGracePeriodSeconds"]
            asleep_s = max(
                one.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0) for one in pod.running
            )

            assert asleep_s < grace_s, pod.owner
