"""The table of parts: addresses, order, and whose word counts."""

import json

import pytest

from deploy.local.parts import HOST_MEMORY_BYTES, part_names, stack_parts
from deploy.local.paths import StackPaths
from deploy.local.settings import StackSettings
from gateway.envoy.settings import EnvoySettings
from gateway.settings import GatewaySettings

SIDECAR_FILES = ("SIDECAR_DATA_DIR", "SIDECAR_UNIX_SOCKET")


@pytest.fixture
def make_settings(tmp_path):
    def make(**changes):
        return StackSettings(paths=StackPaths(tmp_path), model_dir=tmp_path / "model", port=8000, **changes)

    return make


@pytest.fixture
def make_parts(make_settings):
    def make(**changes):
        return {part.name: part for part in stack_parts(make_settings(**changes))}

    return make


def told(settings):
    """Return what Envoy is told."""
    env = {part.name: part for part in stack_parts(settings)}["envoy"].env
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        return EnvoySettings()


def transfer_config(engine):
    command = engine.command
    return json.loads(command[command.index("--kv-transfer-config") + 1])


@pytest.mark.parametrize("engines", [1, 2, 4])
def test_parts_come_in_start_order(make_parts, engines):
    assert tuple(make_parts(engines=engines)) == part_names(engines)


def test_the_first_of_a_kind_has_no_number():
    assert part_names(1) == ("redis", "manager", "sidecar", "engine", "turn", "gateway", "envoy")
    pods = ("sidecar", "sidecar-1", "engine", "engine-1", "turn", "turn-1")
    assert part_names(2) == ("redis", "manager", *pods, "gateway", "envoy")


def test_a_store_is_a_directory_of_the_stack_s_or_a_part_of_it_and_all_sidecars_have_the_same(
    make_parts, make_settings
):
    assert tuple(make_parts(store="s3", engines=2)) == part_names(2, "s3")
    assert part_names(1, "s3")[:2] == ("redis", "s3")
    urls = {}
    for store in ("", "dir", "s3"):
        parts = make_parts(store=store, engines=2)
        (urls[store],) = {parts[name].env.get("SIDECAR_STORE_URL") for name in ("sidecar", "sidecar-1")}
    assert urls == {"": None, "dir": f"file://{make_settings().paths.store}", "s3": "s3://kv-cache/stack"}
    assert (
        make_parts(store="s3")["sidecar"].env["AWS_ENDPOINT_URL"]
        == make_parts(store="s3")["s3"].url[: -len("/kv-cache")]
    )


def test_every_address_is_on_loopback(make_parts):
    parts = make_parts(engines=2)
    ours = {
        f"{name}={value}" for part in parts.values() for name, value in part.env.items() if name.endswith("_LISTEN")
    }

    assert all("127.0.0.1" in part.url for part in parts.values())
    assert {listen.partition("=")[0] for listen in ours} == {
        "MANAGER_LISTEN",
        "SIDECAR_LISTEN",
        "GATEWAY_EXT_PROC_LISTEN",
    }
    assert all("=127.0.0.1:" in listen for listen in ours)
    assert parts["gateway"].env["GATEWAY_HOST"] == parts["turn"].env["TURN_LISTEN_HOST"] == "127.0.0.1"
    for name, flag in {"redis": "--bind", "engine": "--host"}.items():
        command = parts[name].command
        assert command[command.index(flag) + 1] == "127.0.0.1"


def test_no_two_parts_share_a_port_or_a_file(make_parts):
    parts = make_parts(engines=4).values()
    ports = [port for part in parts for port in part.ports]
    files = [part.env[name] for part in parts if part.kind == "sidecar" for name in SIDECAR_FILES]

    assert len(set(ports)) == len(ports)
    assert len(set(files)) == 4 * len(SIDECAR_FILES)


def test_a_list_of_endpoints_in_the_callers_environment_does_not_reach_the_gateway(make_parts, tmp_path, monkeypatch):
    monkeypatch.setenv("GATEWAY_ENDPOINTS", '[{"name": "another", "url": "http://127.0.0.1:1"}]')
    env = make_parts()["gateway"].env

    assert json.loads(env["GATEWAY_ENDPOINTS"]) == []
    assert env["GATEWAY_ENDPOINTS_FILE"] == str(StackPaths(tmp_path).endpoints)


def test_envoy_waits_for_a_silent_pod_as_long_as_the_gateways_own_front(make_settings, monkeypatch):
    monkeypatch.delenv("GATEWAY_IDLE_TIMEOUT_S", raising=False)
    assert told(make_settings()).idle_timeout_s == 600

    monkeypatch.setenv("GATEWAY_IDLE_TIMEOUT_S", "90")
    assert told(make_settings()).idle_timeout_s == 90
    assert told(make_settings(env={"GATEWAY_IDLE_TIMEOUT_S": "15"})).idle_timeout_s == 15


def test_envoy_gives_a_gateway_the_time_that_is_shipped_unless_the_gateway_waits_longer_itself(make_settings):
    shipped = EnvoySettings.model_fields["plugin_timeout_s"].default
    manager_s = GatewaySettings.model_fields["manager_timeout_s"].default

    assert told(make_settings()).plugin_timeout_s == shipped
    assert told(make_settings(env={"GATEWAY_MANAGER_TIMEOUT_S": str(manager_s)})).plugin_timeout_s == shipped
    assert told(make_settings(env={"GATEWAY_MANAGER_TIMEOUT_S": "20"})).plugin_timeout_s == 23


def test_sidecars_may_fetch_from_each_other_and_from_nobody_else(make_parts):
    parts = make_parts(engines=3)
    urls = {part.url for part in parts.values() if part.kind == "sidecar"}

    assert json.loads(make_parts()["sidecar"].env["SIDECAR_PEERS"]) == []
    for part in (parts[name] for name in ("sidecar", "sidecar-1", "sidecar-2")):
        assert set(json.loads(part.env["SIDECAR_PEERS"])) == urls - {part.url}


@pytest.mark.parametrize(("dev", "mode"), [(False, "0"), (True, "1")])
def test_development_routes_are_on_only_when_asked_for(make_parts, monkeypatch, dev, mode):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")

    assert make_parts(dev=dev)["engine"].env["VLLM_SERVER_DEV_MODE"] == mode


def test_the_callers_environment_wins_over_a_default_but_not_over_an_address(make_parts, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("MANAGER_LISTEN", "0.0.0.0:1")
    parts = make_parts()

    assert parts["engine"].env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert parts["manager"].env["MANAGER_LISTEN"] == "127.0.0.1:8011"


def test_the_stacks_own_overlay_wins_over_all(make_parts):
    parts = make_parts(env={"MANAGER_SWEEP_INTERVAL_S": "1"})

    assert parts["manager"].env["MANAGER_SWEEP_INTERVAL_S"] == "1"


def test_no_secret_is_on_a_command_line(make_parts, tmp_path):
    secret_path = str(StackPaths(tmp_path).secret)

    assert secret_path in transfer_config(make_parts()["engine"])["kv_connector_extra_config"].values()
    assert not any("test-key" in word for part in make_parts().values() for word in part.command)


def test_each_sidecar_takes_a_modest_part_of_the_machines_memory_unless_the_caller_says_another(
    make_parts, monkeypatch
):
    names = ("sidecar", "sidecar-1")
    monkeypatch.delenv("SIDECAR_MEMORY_LIMIT_BYTES", raising=False)
    shipped = make_parts(engines=2)
    monkeypatch.setenv("SIDECAR_MEMORY_LIMIT_BYTES", "0")
    asked = make_parts(engines=2)

    assert {shipped[name].env["SIDECAR_MEMORY_LIMIT_BYTES"] for name in names} == {str(HOST_MEMORY_BYTES)}
    assert {asked[name].env["SIDECAR_MEMORY_LIMIT_BYTES"] for name in names} == {"0"}
