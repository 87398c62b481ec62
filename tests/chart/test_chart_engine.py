"""What stands beside vLLM: bytes, the connector's keys, and that engine and sidecar meet at the same sockets."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import yaml

from deploy.chart.process_settings import CHART_CONNECTOR_KEYS, connector_schema
from kv_sidecar.settings import SidecarSettings
from tests.chart.manifests import env_of, of_kind, one, pod_of, pods
from tests.chart.releases import ENGINE, INJECTOR, LMCACHE, REDIS, RELEASES, TLS_SECRET, merged
from tests.chart.rendering import CHART, REGISTRY, Release, render

AMOUNTS = {"0": 0, "500M": 500_000_000, "1.5Gi": 1_610_612_736, "4Gi": 4 << 30, 4096: 4096, 6_442_450_944: 6 << 30}
SOURCE = Path(__file__).parents[2] / "vllm_plugin" / "connector" / "settings.py"


def engine_pod(values: dict):
    """Return the engine's pod of a release with these values."""
    documents = render(Release(merged(REDIS, ENGINE, values)))
    return next(made for made in pods(documents) if made.component == "engine")


def container(pod, name: str):
    """Return the container of a pod that has this name."""
    return next(made for made in pod.containers if made["name"] == name)


@pytest.mark.parametrize("amount", AMOUNTS)
def test_amounts_reach_the_sidecar_as_whole_bytes(amount):
    values = {"sidecar": {"memoryLimit": amount, "resources": {"limits": {"memory": "8Gi"}}}}
    env = env_of(container(engine_pod(values), "kv-sidecar"))

    assert env["SIDECAR_MEMORY_LIMIT_BYTES"] == str(AMOUNTS[amount])


def test_the_sidecar_takes_what_the_chart_says(monkeypatch):
    values = {"sidecar": {"peerNetworks": ["10.0.0.0/8"], "settings": {"ioThreads": 8}}}
    for name, value in env_of(container(engine_pod(values), "kv-sidecar")).items():
        monkeypatch.setenv(name, value if isinstance(value, str) else "engine-0")
    settings = SidecarSettings()

    assert settings.peers == ("10.0.0.0/8",)
    assert settings.io_threads == 8
    assert settings.memory_limit_bytes == 4 << 30
    assert settings.disk_limit_bytes == 18 << 30


def test_sidecar_turn_process_and_connector_meet_at_the_same_socket():
    pod = engine_pod({})
    sidecar, vllm, turn = (container(pod, name) for name in ("kv-sidecar", "vllm", "turn"))
    transfer = json.loads(next(word for word in vllm["args"] if "kv-transfer" in word).partition("=")[2])
    socket = env_of(sidecar)["SIDECAR_UNIX_SOCKET"]
    directory = str(Path(socket).parent)
    mounts = {
        mount["name"]
        for made in (sidecar, vllm, turn)
        for mount in made["volumeMounts"]
        if mount["mountPath"] == directory
    }

    assert transfer["kv_connector_extra_config"]["sidecar"] == f"unix://{socket}" == env_of(turn)["TURN_SIDECAR"]
    assert mounts == {"kv-run"}


@pytest.mark.parametrize(("values", "scheme"), [({}, "http"), (TLS_SECRET, "https")], ids=["plain", "tls"])
def test_the_turn_process_stands_before_vllm_which_has_only_the_connector_of_ours(values, scheme):
    pod = engine_pod(merged(values, {"discovery": {"port": 8080, "turnPort": 8081}}))
    vllm, turn = container(pod, "vllm"), container(pod, "turn")
    env = env_of(turn)

    assert env["TURN_ENGINE_URL"] == f"{scheme}://127.0.0.1:8080"
    assert "--port=8080" in vllm["args"]
    assert turn["ports"] == [{"name": "turn", "containerPort": int(env["TURN_LISTEN_PORT"])}]
    assert env["TURN_LISTEN_PORT"] == "8081"
    assert "--middleware" not in " ".join(vllm["args"])
    assert not [name for name in env_of(vllm) if name.startswith("TURN_")]


def test_the_turn_process_is_alive_by_itself_and_ready_with_vllm():
    """A dead engine must not restart it: it holds the answers that outlive their engine."""
    turn = container(engine_pod(TLS_SECRET), "turn")
    asked = {kind: turn[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}

    assert {kind: get["path"] for kind, get in asked.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/health",
    }
    assert {(get["port"], get["scheme"]) for get in asked.values()} == {("turn", "HTTPS")}


def test_the_turn_process_gets_sigterm_together_with_vllm():
    """A native sidecar would get it after vLLM has ended, too late to refuse turns."""
    pod = engine_pod({"engine": {"preStopSleepS": 7}})

    assert [one["name"] for one in pod.spec["containers"]] == ["vllm", "turn"]
    assert {one["lifecycle"]["preStop"]["sleep"]["seconds"] for one in pod.spec["containers"]} == {7}


def test_the_turn_process_gets_the_resources_of_the_values_also_in_injected_pods():
    asked = {"requests": {"cpu": "1", "memory": "300Mi"}, "limits": {"memory": "2Gi"}}
    documents = render(Release(merged(REDIS, ENGINE, INJECTOR, {"engine": {"turnResources": asked}})))
    injected = json.loads(one(documents, "ConfigMap", "-injector")["data"]["parts.json"])["turn"]

    assert container(pod_of(documents, "engine"), "turn")["resources"] == injected["resources"] == asked


def test_an_injected_turn_process_keeps_no_pod_out_of_its_owner_s_services():
    """Behind an engine on another port it is never ready."""
    documents = render(Release(merged(REDIS, ENGINE, INJECTOR)))
    injected = json.loads(one(documents, "ConfigMap", "-injector")["data"]["parts.json"])["turn"]
    own = container(pod_of(documents, "engine"), "turn")

    assert own.keys() - injected.keys() == {"readinessProbe", "lifecycle"}
    assert {key: own[key] for key in injected} == injected


def test_with_lmcache_there_is_no_sidecar_and_the_turn_answers_at_its_port():
    documents = render(Release(merged(REDIS, LMCACHE)))
    pod = pod_of(documents, "engine")
    vllm, turn = container(pod, "vllm"), container(pod, "turn")
    transfer = json.loads(next(word for word in vllm["args"] if "kv-transfer" in word).partition("=")[2])
    env = env_of(turn)

    assert [one["name"] for one in pod.containers] == ["vllm", "turn"]
    assert transfer["kv_connector"] == "LMCacheMPConnector"
    assert transfer["kv_connector_extra_config"]["lmcache.mp.host"] == "tcp://$(HOST_IP)"
    assert [port["containerPort"] for port in vllm["ports"]] == [8000]
    assert {port["containerPort"] for port in turn["ports"]} == {8010, 50061}
    assert env["TURN_LMCACHE_LISTEN"] == "0.0.0.0:50061"
    assert env["TURN_LMCACHE_MODEL"] == next(word for word in vllm["args"] if "--model=" in word).partition("=")[2]
    assert env["TURN_LMCACHE_WORLD_SIZE"] == "1"
    assert "TURN_SIDECAR" not in env
    # Kubernetes puts in only what stands before.
    names = [item["name"] for item in turn["env"]]
    assert names.index("HOST_IP") < names.index("TURN_LMCACHE_URL")
    assert "HOST_IP" in env_of(vllm)


def test_below_lmcache_the_sidecar_is_reached_by_its_socket_alone():
    pod = pod_of(render(Release(merged(REDIS, LMCACHE, {"engine": {"lmcache": {"secondTier": True}}}))), "engine")
    sidecar = container(pod, "kv-sidecar")
    env = env_of(sidecar)

    assert env["SIDECAR_UNIX_SOCKET"] == "/run/context-cache/sidecar.sock"
    assert env["SIDECAR_LISTEN"] == ""
    assert (env["SIDECAR_PEERS"], env["SIDECAR_HANDOVER_PEERS"]) == ("[]", "[]")
    assert [port["name"] for port in sidecar["ports"]] == ["kv-metrics"]
    assert {port["name"] for port in container(pod, "turn")["ports"]} == {"turn", "kv-grpc"}


def test_nothing_but_the_sockets_and_read_only_secrets_is_seen_by_engine_and_sidecar_both():
    """The sidecar's disk is its own, and /dev/shm is vLLM's."""
    pod = engine_pod(TLS_SECRET)
    seen = [
        {mount["mountPath"] for mount in container(pod, name)["volumeMounts"] if not mount.get("readOnly")}
        for name in ("kv-sidecar", "vllm", "turn")
    ]

    assert seen[0] & seen[1] == seen[2] == {"/run/context-cache"}
    assert "/var/lib/context-cache" in seen[0]
    assert "/var/lib/context-cache" not in {mount["mountPath"] for mount in container(pod, "vllm")["volumeMounts"]}
    assert "/dev/shm" in seen[1]


def test_what_the_sidecar_takes_at_its_start_is_requested():
    """Else its node is chosen without it, and the pod is the first that goes when the node is short of memory."""
    sidecar = container(engine_pod({}), "kv-sidecar")
    requested = sidecar["resources"]["requests"]["memory"]

    assert int(requested.removesuffix("Gi")) << 30 > int(env_of(sidecar)["SIDECAR_MEMORY_LIMIT_BYTES"])


def test_the_containers_of_the_engine_s_pod_run_as_one_user():
    """Two of them open the third one's sockets."""
    pod = engine_pod({"engine": {"pod": {"securityContext": {"runAsUser": 1001}}}})

    assert pod.spec["securityContext"]["runAsUser"] == 1001
    assert {made.get("securityContext", {}).get("runAsUser") for made in pod.running} == {None}


def test_a_name_in_extra_env_replaces_what_the_chart_would_say():
    own = {"name": "VLLM_CPU_KVCACHE_SPACE", "value": "9"}
    values = {"engine": {"gpu": {"count": 0}, "blockSize": 32, "pod": {"extraEnv": [own]}}}
    names = [item["name"] for item in container(engine_pod(values), "vllm")["env"]]

    assert names.count("VLLM_CPU_KVCACHE_SPACE") == 1
    assert env_of(container(engine_pod(values), "vllm"))["VLLM_CPU_KVCACHE_SPACE"] == "9"


def test_a_token_in_extra_env_takes_the_place_of_the_secret_s():
    own = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "own", "key": "hub"}}}
    values = {"engine": {"hfTokenSecret": {"name": "hub"}, "pod": {"extraEnv": [own]}}}
    given = [item for item in container(engine_pod(values), "vllm")["env"] if item["name"] == "HF_TOKEN"]

    assert given == [own]


def test_the_shared_store_and_its_credentials_reach_the_sidecar():
    own = {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "kv-store", "key": "secret"}}}
    values = {"sidecar": {"settings": {"storeUrl": "s3://kv/release"}, "extraEnv": [own]}}
    sidecar = container(engine_pod(values), "kv-sidecar")

    assert own in sidecar["env"]
    assert env_of(sidecar)["SIDECAR_STORE_URL"] == "s3://kv/release"


@pytest.mark.parametrize("peers", [True, False])
def test_a_pod_that_ends_knows_its_name_its_address_and_who_takes_its_contexts_over(peers):
    env = env_of(container(engine_pod({"sidecar": {"peers": peers}}), "kv-sidecar"))
    named = {"fieldRef": {"fieldPath": "metadata.name"}}
    address = {"fieldRef": {"fieldPath": "status.podIP"}}

    assert (env["SIDECAR_ENDPOINT_NAME"], env["POD_IP"]) == (named, address)
    assert env["SIDECAR_HANDOVER_ADDRESS"] == "$(POD_IP):50061"
    takers = json.loads(env["SIDECAR_HANDOVER_PEERS"])
    assert takers == (["cc-context-cache-engines.llm.svc.cluster.local:50061"] if peers else [])


def test_with_tls_vllm_and_its_probes_speak_https():
    vllm = container(engine_pod(TLS_SECRET), "vllm")
    files = {mount["mountPath"] for mount in vllm["volumeMounts"]}

    assert {vllm[probe]["httpGet"]["scheme"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")} == {
        "HTTPS"
    }
    assert "--ssl-certfile=/etc/context-cache/tls/tls.crt" in vllm["args"]
    assert "/etc/context-cache/tls" in files


def test_pods_are_discovered_without_an_engine_of_the_chart_s_own():
    service = one(render(Release(merged(REDIS, INJECTOR))), "Service", "-engines")
    label = {"context-cache.io/engines": "cc-context-cache"}

    assert service["spec"]["selector"] == label
    assert label.items() <= service["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None"


def test_injected_pods_are_closed_at_the_sidecar_s_ports_alone():
    documents = render(Release(merged(REDIS, INJECTOR, {"discovery": {"sidecarPort": 9092}})))
    policy = next(made for made in of_kind(documents, "NetworkPolicy") if made["metadata"]["name"].endswith("injected"))
    everybody = next(rule for rule in policy["spec"]["ingress"] if "from" not in rule)
    ranges = [(rule["port"], rule["endPort"]) for rule in everybody["ports"] if "protocol" not in rule]

    assert ranges == [(1, 8009), (8011, 9090), (9093, 65535)]
    assert policy["spec"]["policyTypes"] == ["Ingress"]


EVENTS = {"sidecar": {"settings": {"eventsListen": "0.0.0.0:5561", "eventsTenants": ["team-a"]}}}
ROUTER = {"podSelector": {"matchLabels": {"app": "router"}}}


@pytest.mark.parametrize("name", ["engine", "injected"])
def test_events_are_open_to_named_peers_alone(name):
    """Seen failing: when the events' ports are among those of an injected pod that anybody reaches."""
    for subscribers in ([], [ROUTER]):
        values = merged(REDIS, ENGINE, INJECTOR, EVENTS, {"networkPolicy": {"eventSubscribers": subscribers}})
        policies = of_kind(render(Release(values)), "NetworkPolicy")
        policy = next(made for made in policies if made["metadata"]["name"].endswith(f"-{name}"))
        rules = [rule for rule in policy["spec"]["ingress"] if _opens(rule, 5561) or _opens(rule, 5562)]

        assert [rule["from"] for rule in rules] == [subscribers] * len(subscribers)
        assert all(_opens(rule, 5561) and _opens(rule, 5562) for rule in rules)


def _opens(rule, port):
    tcp = [it for it in rule["ports"] if it.get("protocol", "TCP") == "TCP"]
    return any(it["port"] <= port <= it.get("endPort", it["port"]) for it in tcp)


def test_events_have_their_settings_and_named_ports():
    pod = engine_pod(EVENTS)
    sidecar = container(pod, "kv-sidecar")

    assert env_of(sidecar)["SIDECAR_EVENTS_LISTEN"] == "0.0.0.0:5561"
    assert env_of(sidecar)["SIDECAR_EVENTS_TENANTS"] == '["team-a"]'
    ports = {port["name"]: port["containerPort"] for port in sidecar["ports"]}
    assert (ports["kv-events"], ports["kv-replays"]) == (5561, 5562)


def test_the_connector_s_keys_are_those_of_its_settings():
    made = next(
        node
        for node in ast.parse(SOURCE.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "ConnectorSettings"
    )
    fields = {node.target.id for node in made.body if isinstance(node, ast.AnnAssign)}
    schema = connector_schema()

    assert schema["properties"].keys() | CHART_CONNECTOR_KEYS.keys() == fields
    assert all(key["description"] for key in schema["properties"].values())


@pytest.mark.parametrize(("turn", "given"), [({}, "45"), ({"drainTimeoutS": 30}, "30")])
def test_turns_end_when_vllm_would_leave_them_without_an_end(turn, given):
    pod = engine_pod({"engine": {"shutdownTimeoutS": 45, "turn": turn}})

    assert "--shutdown-timeout=45" in container(pod, "vllm")["args"]
    assert env_of(container(pod, "turn"))["TURN_DRAIN_TIMEOUT_S"] == given


def requests_of(release: str, container: str) -> dict:
    """Return what a container of the engine's pod asks for."""
    [found] = [one for one in pod_of(render(RELEASES[release]), "engine").containers if one["name"] == container]
    return found["resources"]["requests"]


def test_a_node_is_asked_for_the_disk_that_blocks_and_models_take_of_it():
    """Else the scheduler puts a pod where there is no room, and the kubelet evicts it when the disk is full."""
    values = merged(REDIS, ENGINE, {"engine": {"modelCache": {"emptyDirSize": "60Gi"}}})
    pod = pod_of(render(Release(values)), "engine")
    vllm = next(one for one in pod.containers if one["name"] == "vllm")
    [models] = [volume for volume in pod.spec["volumes"] if volume["name"] == "models"]

    assert requests_of("engine", "kv-sidecar")["ephemeral-storage"] == "20Gi"
    assert "ephemeral-storage" not in requests_of("sidecar on ephemeral volumes", "kv-sidecar")
    assert "ephemeral-storage" not in requests_of("sidecar on a claim", "kv-sidecar")
    assert vllm["resources"]["requests"]["ephemeral-storage"] == "60Gi"
    assert models["emptyDir"] == {"sizeLimit": "60Gi"}
    assert "ephemeral-storage" not in requests_of("engine with a model cache", "vllm")


def test_volumes_mounts_and_init_containers_of_others_arrive():
    pod = pod_of(render(RELEASES["engine with more volumes and init containers"]), "engine")
    mounts = {
        one["name"]: {mount["mountPath"]: mount for mount in one.get("volumeMounts", [])} for one in pod.containers
    }

    assert [one["name"] for one in pod.spec["initContainers"]] == ["kv-sidecar", "fetch"]
    assert {"extra", "store"} <= {volume["name"] for volume in pod.spec["volumes"]}
    assert mounts["vllm"]["/models"]["readOnly"] is True
    assert "/extra" in mounts["vllm"]
    assert "/store" in mounts["kv-sidecar"]


def test_the_list_of_images_for_clusters_without_internet_is_what_the_chart_runs():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    listed = {one["image"] for one in yaml.safe_load(chart["annotations"]["artifacthub.io/images"])}
    used = {one["image"] for pod in pods(render(RELEASES["everything"])) for one in pod.containers}

    assert {image.removeprefix(f"{REGISTRY}/") for image in used} == listed


def test_names_are_resolved_by_whoever_does_it_in_the_cluster():
    policy = one(render(RELEASES["defaults"]), "NetworkPolicy", "-gateway")
    [dns] = [rule for rule in policy["spec"]["egress"] if {"port": 53, "protocol": "UDP"} in rule["ports"]]

    assert {"port": 5353, "protocol": "UDP"} in dns["ports"]
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in dns["to"]
