"""The table of parts: addresses, order, and whose word counts."""

import json

import pytest

from deploy.local.parts import PART_NAMES, StackSettings, host_memory_bytes, stack_parts
from deploy.local.state import StackPaths


@pytest.fixture
def make_parts(tmp_path):
    def make(**changes):
        settings = StackSettings(StackPaths(tmp_path), tmp_path / "model", 8000, **changes)
        return {part.name: part for part in stack_parts(settings)}

    return make


def test_parts_come_in_start_order(make_parts):
    assert tuple(make_parts()) == PART_NAMES


def test_every_address_is_on_loopback(make_parts):
    parts = make_parts()
    ours = {f"{name}={value}" for part in parts.values() for name, value in part.env.items() if "_LISTEN" in name}

    assert all("127.0.0.1" in part.url for part in parts.values())
    assert ours
    assert all("=127.0.0.1:" in listen for listen in ours)
    assert parts["gateway"].env["GATEWAY_HOST"] == "127.0.0.1"
    for name, flag in {"redis": "--bind", "engine": "--host"}.items():
        command = parts[name].command
        assert command[command.index(flag) + 1] == "127.0.0.1"


def test_the_gateway_knows_where_engine_and_sidecar_listen(make_parts):
    parts = make_parts()
    (endpoint,) = json.loads(parts["gateway"].env["GATEWAY_ENDPOINTS"])

    assert endpoint == {"name": "engine-0", "url": parts["engine"].url, "sidecar": parts["sidecar"].url}
    assert parts["engine"].env["TURN_ENDPOINT_NAME"] == endpoint["name"]


def test_connector_and_middleware_use_the_sidecars_socket(make_parts):
    parts = make_parts()
    command = parts["engine"].command
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    socket = f"unix://{parts['sidecar'].env['SIDECAR_UNIX_SOCKET']}"

    assert transfer["kv_connector_extra_config"]["sidecar"] == socket
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert parts["engine"].env["TURN_SIDECAR"] == socket


def test_dtype_and_further_arguments_reach_vllm(make_parts):
    command = make_parts(dtype="float32", engine_args=("--max-num-seqs", "2"))["engine"].command

    assert command[command.index("--dtype") + 1] == "float32"
    assert command[-2:] == ("--max-num-seqs", "2")


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

    assert any(secret_path in word for word in make_parts()["engine"].command)  # its path, to be read by the owner
    assert not any("test-key" in word for part in make_parts().values() for word in part.command)


@pytest.mark.parametrize(
    ("free", "limit"),
    [(64 << 20, 0), (255 << 20, 0), (256 << 20, 128 << 20), (1 << 30, 512 << 20), (64 << 30, 1 << 30)],
)
def test_the_sidecar_takes_at_most_half_of_the_shared_memory(free, limit):
    assert host_memory_bytes(free) == limit
