"""What a stack's parts are told when links between them run through proxies."""

from __future__ import annotations

import json

import pytest

from deploy.local.parts import stack_parts
from deploy.local.paths import StackPaths
from deploy.local.pods import endpoints_of
from deploy.local.settings import StackSettings
from tests.kit.links import Links

NAMES = (
    "manager-redis",
    "gateway-manager",
    "gateway-turn-1",
    "gateway-sidecar-1",
    "turn-manager-1",
    "turn-sidecar-1",
    "connector-sidecar-1",
    "sidecar-manager-1",
    "turn-engine-1",
    "gateway-engine-1",
)


@pytest.fixture
def settings(tmp_path):
    return StackSettings(paths=StackPaths(tmp_path), model_dir=tmp_path / "model", port=8000, engines=2)


def connectors_sidecar(part):
    transfer = json.loads(part.command[part.command.index("--kv-transfer-config") + 1])
    return transfer["kv_connector_extra_config"]["sidecar"]


def test_a_proxy_stands_in_for_a_parts_own_address_wherever_that_part_is_asked_there(settings):
    links = Links(settings.ports, settings.paths, NAMES)
    for number, name in enumerate(NAMES):
        links.proxies[name].address = f"127.0.0.1:{number + 1}"  # as it would be told by `start`
    direct = {part.name: part for part in stack_parts(settings)}
    parts = {name: links.overlaid(part) for name, part in direct.items()}
    endpoints = links.endpoints(endpoints_of(settings))

    assert parts["manager"].env["MANAGER_REDIS_URL"] == "redis://127.0.0.1:1/0"
    assert parts["gateway"].env["GATEWAY_MANAGER"] == "127.0.0.1:2"
    assert (endpoints[1]["turn_url"], endpoints[1]["sidecar"]) == ("http://127.0.0.1:3", "127.0.0.1:4")
    assert json.loads(parts["envoy"].env["ENVOY_PODS"])[1] == "127.0.0.1:3"
    assert endpoints[1]["url"] == "http://127.0.0.1:10"
    assert json.loads(parts["envoy"].env["ENVOY_ENGINES"])[1] == "127.0.0.1:10"
    assert json.loads(parts["sidecar"].env["SIDECAR_PEERS"]) == ["127.0.0.1:4"]
    assert parts["turn-1"].env["TURN_MANAGER"] == "127.0.0.1:5"
    assert parts["turn-1"].env["TURN_SIDECAR"] == "127.0.0.1:6"
    assert connectors_sidecar(parts["engine-1"]) == "127.0.0.1:7"
    assert parts["sidecar-1"].env["SIDECAR_MANAGER"] == "127.0.0.1:8"
    assert parts["turn-1"].env["TURN_ENGINE_URL"] == "http://127.0.0.1:9"
    # What is not linked is as it was, and a part listens where it did.
    assert parts["engine"] == direct["engine"]
    assert endpoints[0] == endpoints_of(settings)[0]
    assert parts["sidecar-1"].env["SIDECAR_LISTEN"] == direct["sidecar-1"].env["SIDECAR_LISTEN"]
    links.close()


def test_a_link_that_there_is_not_is_refused(settings):
    with pytest.raises(AssertionError, match="no link is called gateway-redis"):
        Links(settings.ports, settings.paths, ["gateway-redis"])
