"""compose.yaml against the processes that it starts: commands, settings, ports, paths, images and secrets."""

from __future__ import annotations

import json
import re
import stat

import pytest
import yaml
from prometheus_client import CollectorRegistry

from context_manager.settings import ManagerSettings
from contextcache.cli.serve import PARTS
from deploy.chart.process_settings import connector_fields
from deploy.docker.keys import make_keys
from gateway.metrics import Metrics
from gateway.settings import GatewaySettings
from gateway.tenants.keys import KeyFile
from kv_sidecar.settings import SidecarSettings
from tests.kit.compose import ROOT, read_compose, transfer_config
from vllm_plugin.turn.settings import TurnSettings

COMPOSE = read_compose()
SERVICES = COMPOSE["services"]
ENGINES = ("engine-cpu", "engine-gpu")
SETTINGS = {
    "gateway": ("GATEWAY_", GatewaySettings),
    "manager": ("MANAGER_", ManagerSettings),
    "sidecar": ("SIDECAR_", SidecarSettings),
    "turn": ("TURN_", TurnSettings),
}


def settings_of(service: str, monkeypatch):
    """Return the settings that a service's process would have."""
    prefix, settings = SETTINGS[service]
    for name, value in SERVICES[service]["environment"].items():
        monkeypatch.setenv(name, str(value))
    return prefix, settings()


def test_the_services_are_those_of_a_deployment():
    assert set(SERVICES) == {"prepare", "valkey", "manager", "sidecar", "turn", "gateway", *ENGINES}
    assert {name: SERVICES[name]["profiles"] for name in ENGINES} == {"engine-cpu": ["cpu"], "engine-gpu": ["gpu"]}


@pytest.mark.parametrize("service", SETTINGS)
def test_each_variable_is_a_setting_of_its_process(service, monkeypatch):
    """Seen to fail with SIDECAR_SOCKET for SIDECAR_UNIX_SOCKET."""
    prefix, settings = settings_of(service, monkeypatch)
    ours = re.compile("GATEWAY_|MANAGER_|SIDECAR_|TURN_")
    given = {name for name in SERVICES[service]["environment"] if ours.match(name)}

    assert given <= {f"{prefix}{field.upper()}" for field in type(settings).model_fields}
    assert given


def test_each_process_of_ours_is_a_command_of_the_image():
    commands = {name: SERVICES[name]["command"] for name in SETTINGS}

    assert commands == {name: ["serve", name] for name in commands}
    assert commands.keys() <= PARTS.keys()
    assert 'ENTRYPOINT ["context-cache"]' in (ROOT / "deploy" / "docker" / "Dockerfile").read_text()


def test_the_parts_find_each_other(monkeypatch):
    """Seen to fail with another port of the sidecar, and with another path of its socket in the connector's options."""
    gateway, manager, sidecar, turn = (settings_of(name, monkeypatch)[1] for name in SETTINGS)
    [pod] = gateway.endpoints

    assert manager.listen == f"0.0.0.0:{gateway.manager.rpartition(':')[2]}"
    assert manager.redis_url.get_secret_value() == "redis://valkey:6379/0"
    assert (pod.url, pod.sidecar) == (turn.engine_url, f"sidecar:{sidecar.listen.rpartition(':')[2]}")
    assert (turn.engine_url, turn.listen_host) == ("http://engine:8000", "0.0.0.0")
    assert pod.turn_url == f"http://turn:{turn.listen_port}"
    assert gateway.manager == sidecar.manager == turn.manager == "manager:50051"
    assert turn.endpoint_name == pod.name
    assert turn.sidecar == f"unix://{sidecar.unix_socket}"
    assert turn.secret_file == gateway.secret_file
    for name in ENGINES:
        connector = transfer_config(SERVICES[name])["kv_connector_extra_config"]
        assert {"--host=0.0.0.0", "--port=8000", "--enable-prompt-tokens-details"} <= set(SERVICES[name]["command"])
        assert SERVICES[name]["networks"] == {"default": {"aliases": ["engine"]}}
        assert f"--shutdown-timeout={turn.drain_timeout_s:.0f}" in SERVICES[name]["command"]
        assert (connector["sidecar"], connector["secret_file"]) == (turn.sidecar, str(turn.secret_file))
        assert connector.keys() <= {field.name for field in connector_fields()}


@pytest.mark.parametrize("service", [name for name in SERVICES if name != "prepare"])
def test_each_service_is_asked_for_its_health_on_a_port_that_it_opens(service, monkeypatch):
    check = " ".join(SERVICES[service]["healthcheck"]["test"])
    port = re.search(r"127\.0\.0\.1:(\d+)", check)

    if service == "valkey":
        assert check == "CMD valkey-cli ping"
    elif service in ENGINES:
        assert f"--port={port[1]}" in SERVICES[service]["command"]
    else:
        settings = settings_of(service, monkeypatch)[1]
        own = {"gateway": "port", "turn": "listen_port"}
        assert int(port[1]) == getattr(settings, own.get(service, "metrics_port"))


def test_the_paths_of_settings_are_volumes_and_secrets_of_their_service(monkeypatch):
    for name in (*SETTINGS, *ENGINES):
        mounted = {volume.partition(":")[2] for volume in SERVICES[name].get("volumes", [])}
        mounted |= {f"/run/secrets/{secret}" for secret in SERVICES[name].get("secrets", [])}
        texts = [str(value) for value in SERVICES[name]["environment"].values()]
        paths = {path for text in texts for path in re.findall(r"(?:unix://|^)(/[\w/.-]+)", text)} - {"/tmp"}
        assert {path for path in paths if not any(path.startswith(where) for where in mounted)} == set()
    owned = set(SERVICES["prepare"]["entrypoint"][2:])
    assert owned == {volume.partition(":")[2] for volume in SERVICES["prepare"]["volumes"]}
    assert owned >= {v.partition(":")[2] for name in (*ENGINES, "sidecar", "turn") for v in SERVICES[name]["volumes"]}


def test_nothing_is_published_but_the_gateway_and_that_on_loopback():
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}

    assert published == {"gateway": ["127.0.0.1:8000:8000"]}


def test_images_are_built_from_the_dockerfiles_and_others_have_the_chart_s_versions():
    values = yaml.safe_load((ROOT / "charts" / "context-cache" / "values.yaml").read_text())
    valkey = values["valkey"]["image"]
    base = re.search(
        r"^ARG VLLM_IMAGE=.*:(v[\d.]+)$", (ROOT / "deploy/docker/Dockerfile.vllm").read_text(), re.MULTILINE
    )
    built = {service["build"]["dockerfile"] for service in SERVICES.values() if "build" in service}

    assert SERVICES["valkey"]["image"] == f"{valkey['registry']}/{valkey['repository']}:{valkey['tag']}"
    assert f":{base[1]}-" in SERVICES["engine-cpu"]["build"]["args"]["VLLM_IMAGE"]
    assert built == {"deploy/docker/Dockerfile", "deploy/docker/Dockerfile.vllm"}
    assert SERVICES["engine-cpu"]["image"] != SERVICES["engine-gpu"]["image"], "each profile builds another one"


def test_keys_are_made_once_and_open_the_gateway(tmp_path):
    folder = tmp_path / ".compose"
    key = make_keys(folder).read_text()
    before = {file.name: file.read_text() for file in folder.iterdir()}

    assert make_keys(folder).read_text() == key
    assert {file.name: file.read_text() for file in folder.iterdir()} == before
    keys = KeyFile(folder / "api-keys.json", metrics=Metrics(CollectorRegistry()))
    caller = keys.caller_of({"authorization": f"Bearer {key.strip()}"})
    assert caller.tenant == "default"
    assert len(before["signing"].strip()) >= 32
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "api-key").stat().st_mode) == 0o600


def test_the_keys_are_those_of_the_compose_file_and_are_never_committed_or_sent_to_a_builder():
    files = {secret["file"] for secret in COMPOSE["secrets"].values()}

    assert files == {".compose/signing", ".compose/api-keys.json"}
    assert ".compose/" in (ROOT / ".gitignore").read_text().splitlines()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert not [line for line in ignored if line.startswith("!.compose")]
    assert json.dumps(SERVICES).count("/run/secrets/") >= 3
