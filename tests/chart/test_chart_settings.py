"""Values and settings of the processes, compared both ways; and what each process would read in its pod."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from context_manager.settings import ManagerSettings
from deploy.chart.process_settings import CHART_CONNECTOR_KEYS, CHART_SETTINGS
from gateway.envoy.settings import EnvoySettings
from gateway.settings import GatewaySettings
from kv_sidecar.settings import SidecarSettings
from pod_injector.settings import InjectorSettings
from tests.chart.each_release import in_each_release
from tests.chart.manifests import env_of, pod_of, pods
from tests.chart.releases import ENGINE, INJECTOR, REDIS, RELEASES, merged
from tests.chart.rendering import CHART, ROOT, Release, render
from vllm_plugin.turn.settings import TurnSettings

PROCESSES = {
    # prefix: settings, where the map is in the values, the pod and the container that get it
    "GATEWAY_": (GatewaySettings, "gateway.settings", "gateway", "gateway"),
    "MANAGER_": (ManagerSettings, "contextManager.settings", "context-manager", "context-manager"),
    "SIDECAR_": (SidecarSettings, "sidecar.settings", "engine", "kv-sidecar"),
    "TURN_": (TurnSettings, "engine.turn", "engine", "turn"),
    "INJECTOR_": (InjectorSettings, "injector.settings", "injector", "injector"),
    "ENVOY_": (EnvoySettings, "envoy.settings", "envoy", "bootstrap"),
}
SETTINGS_OF_THE_CONNECTOR = ROOT / "vllm_plugin" / "connector" / "settings.py"


def connector_settings() -> Any:
    """Return the connector's settings without its package, which imports torch."""
    spec = importlib.util.spec_from_file_location("connector_settings_alone", SETTINGS_OF_THE_CONNECTOR)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ConnectorSettings


ConnectorSettings = connector_settings()
SET_IN_THE_CLUSTER = {"fieldRef": "cc-pod-1", "secretKeyRef": "redis://user:password@redis:6379/0"}


def camel(field: str) -> str:
    """Return a field's key: its own spelling of the rule, so that the chart's is checked."""
    return re.sub("_([a-z0-9])", lambda found: found[1].upper(), field)


def schema_at(path: str) -> dict[str, Any]:
    """Return the schema of the values under a path."""
    root = json.loads((CHART / "values.schema.json").read_text())
    node = root
    for key in path.split("."):
        node = node["properties"][key]
        for inner in [node, *node.get("allOf", [])]:
            if "$ref" in inner:
                node = root["$defs"][inner["$ref"].rpartition("/")[2]]
    return node


@pytest.mark.parametrize("prefix", PROCESSES)
def test_each_setting_is_a_value_or_set_by_the_chart_and_nothing_else_is(prefix):
    settings, path, *_ = PROCESSES[prefix]
    fields = set(settings.model_fields)

    assert set(CHART_SETTINGS[prefix]) <= fields
    assert set(schema_at(path)["properties"]) == {camel(field) for field in fields - set(CHART_SETTINGS[prefix])}


def test_the_connector_s_keys_are_values_but_for_those_that_the_chart_sets():
    fields = set(ConnectorSettings.__dataclass_fields__)

    assert set(CHART_CONNECTOR_KEYS) <= fields
    assert set(schema_at("engine.connector")["properties"]) == fields - set(CHART_CONNECTOR_KEYS)


def sample(settings: type, prefix: str) -> dict[str, Any]:
    """Return a value for each setting that the chart leaves to its user: the default, where there is one."""
    values = {}
    for name, field in settings.model_fields.items():
        default = field.default
        if name not in CHART_SETTINGS[prefix] and default is not None and default is not PydanticUndefined:
            values[name] = json.loads(json.dumps(default, default=str))
    return values


@pytest.mark.parametrize("prefix", PROCESSES)
def test_every_value_arrives_in_the_process_as_it_was_given(prefix):
    settings, path, component, container = PROCESSES[prefix]
    given = sample(settings, prefix)
    section, key = path.split(".")
    values = merged(REDIS, ENGINE, INJECTOR, {section: {key: {camel(name): value for name, value in given.items()}}})
    found = read(settings, prefix, container_of(Release(values), component, container))

    assert json.loads(json.dumps({name: getattr(found, name) for name in given}, default=str)) == given
    assert len(given) >= 5


def container_of(release: Release, component: str, name: str) -> dict:
    """Return one container of a release."""
    [found] = [one for one in pod_of(render(release), component).containers if one["name"] == name]
    return found


def read(settings: type, prefix: str, container: dict):
    """Return the settings as the process itself would read them from a container's variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(prefix):
                patch.delenv(name)
        for name, value in variables(container).items():
            patch.setenv(name, value)
        return settings()


def variables(container: dict) -> dict[str, str]:
    """Return a container's variables with something in the place of what only a cluster knows."""
    return {
        name: value if isinstance(value, str) else SET_IN_THE_CLUSTER[next(iter(value))]
        for name, value in env_of(container).items()
    }


@in_each_release
def test_the_processes_of_every_release_can_read_their_variables_and_know_each(documents):
    num_read = 0
    for pod in pods(documents):
        for container in pod.containers:
            for prefix, (settings, *_) in PROCESSES.items():
                own = {variable for variable in env_of(container) if variable.startswith(prefix)}
                if not own:
                    continue
                known = {f"{prefix}{field.upper()}" for field in settings.model_fields}

                assert own <= known, (pod.owner, container["name"])
                read(settings, prefix, container)
                num_read += 1
    assert num_read >= 2


def test_a_number_of_eight_digits_is_no_power_of_ten():
    """Helm holds numbers as floats: 33554432 would be printed as 3.3554432e+07."""
    values = merged(REDIS, {"gateway": {"settings": {"maxBodyBytes": 33554432, "pullTimeoutS": 0.25}}})
    env = env_of(container_of(Release(values), "gateway", "gateway"))

    assert env["GATEWAY_MAX_BODY_BYTES"] == "33554432"
    assert env["GATEWAY_PULL_TIMEOUT_S"] == "0.25"


@pytest.mark.parametrize(("name", "scheme"), [("engine", "http"), ("tls by cert-manager", "https")])
def test_what_both_ends_must_agree_on_they_agree_on(name, scheme):
    documents = RELEASES[name]
    gateway = read(GatewaySettings, "GATEWAY_", container_of(documents, "gateway", "gateway"))
    turn = read(TurnSettings, "TURN_", container_of(documents, "engine", "turn"))
    sidecar = read(SidecarSettings, "SIDECAR_", container_of(documents, "engine", "kv-sidecar"))
    vllm = container_of(documents, "engine", "vllm")

    assert gateway.kubernetes_scheme == scheme
    assert gateway.manager == turn.manager
    assert (gateway.tls is None, turn.tls is None, sidecar.tls is None) == (scheme == "http",) * 3
    assert turn.endpoint_name == SET_IN_THE_CLUSTER["fieldRef"]
    assert env_of(container_of(documents, "engine", "turn"))["TURN_ENDPOINT_NAME"] == {
        "fieldRef": {"fieldPath": "metadata.name"}
    }
    assert vllm["readinessProbe"]["httpGet"].get("scheme", "HTTP") == scheme.upper()
    assert turn.engine_url.partition(":")[0] == scheme


def connector_of(container: dict) -> Any:
    """Return the connector's settings in vLLM's arguments."""
    words = [*container.get("command", []), *container.get("args", [])]
    [text] = [
        following if word == "--kv-transfer-config" else word.partition("=")[2]
        for word, following in zip(words, [*words[1:], ""], strict=True)
        if word.startswith("--kv-transfer-config")
    ]
    config = json.loads(text)

    assert config["kv_load_failure_policy"] == "recompute"
    return ConnectorSettings.from_extra_config(config["kv_connector_extra_config"])


def test_the_connector_reads_what_the_chart_says_and_finds_the_sidecar():
    sample_ = {
        name: field.default
        for name, field in ConnectorSettings.__dataclass_fields__.items()
        if name not in CHART_CONNECTOR_KEYS and field.default != ""
    }
    release = Release(merged(REDIS, ENGINE, {"engine": {"connector": {**sample_, "weights_epoch": "7"}}}))
    turn, sidecar = (env_of(container_of(release, "engine", name)) for name in ("turn", "kv-sidecar"))
    found = connector_of(container_of(release, "engine", "vllm"))

    assert found.weights_epoch == "7"
    assert found.load_always_ms == ConnectorSettings.__dataclass_fields__["load_always_ms"].default
    assert found.sidecar == f"unix://{sidecar['SIDECAR_UNIX_SOCKET']}"
    assert found.secret_file == turn["TURN_SECRET_FILE"]


def test_limits_in_bytes_are_those_that_kubernetes_reads_from_the_amounts():
    env = env_of(container_of(RELEASES["sidecar settings"], "engine", "kv-sidecar"))

    assert env["SIDECAR_DISK_LIMIT_BYTES"] == str(900 << 30)
    for text, size_bytes in (("1.5Gi", 3 << 29), ("500M", 500_000_000), ("0", 0), ("1048576", 1 << 20)):
        release = Release(merged(REDIS, ENGINE, {"sidecar": {"memoryLimit": text}}))

        found = env_of(container_of(release, "engine", "kv-sidecar"))["SIDECAR_MEMORY_LIMIT_BYTES"]
        assert found == str(size_bytes), text


def test_the_generated_files_of_the_chart_are_up_to_date():
    done = subprocess.run(
        [sys.executable, "-m", "deploy.chart", "--check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["values.schema.json", "README.md"])
def test_a_stale_file_is_noticed(name, monkeypatch):
    from deploy.chart.__main__ import generated, main

    real = generated()
    monkeypatch.setattr("deploy.chart.__main__.generated", lambda: {**real, name: real[name] + "\n"})
    monkeypatch.setattr(sys, "argv", ["deploy.chart", "--check"])

    with pytest.raises(SystemExit, match=name):
        main()
