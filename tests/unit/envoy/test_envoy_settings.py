"""What an Envoy can be told, by file and by option, and what its bootstrap then says."""

from __future__ import annotations

import json

import pytest
import yaml
from pydantic import ValidationError

from deploy.envoy.__main__ import main
from deploy.envoy.bootstrap import bootstrap
from deploy.envoy.keeper import KeeperSettings, envoy_command
from deploy.envoy.settings import EnvoySettings

NEEDED = {"gateways": ["127.0.0.1:1,127.0.0.1:2"], "pods": ["127.0.0.1:3"]}
OPTIONS = ["--gateways", "127.0.0.1:1,127.0.0.1:2", "--pods", "127.0.0.1:3"]


def cluster(name: str, settings: EnvoySettings) -> dict:
    return next(found for found in bootstrap(settings)["static_resources"]["clusters"] if found["name"] == name)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "a b:1", "http://a:1", "", "::1:80"]
)
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(ValidationError):
        EnvoySettings(**NEEDED | {"pods": [address]})


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "envoy"])
def test_the_admin_interface_is_on_loopback_only(host):
    with pytest.raises(ValidationError, match="loopback only"):
        EnvoySettings(**NEEDED, admin_host=host)


@pytest.mark.parametrize(
    ("pods", "kind"),
    [(["127.0.0.1:1", "[::1]:2"], "STATIC"), (["127.0.0.1:1", "engine.pods:2"], "STRICT_DNS")],
)
def test_names_are_looked_up_and_addresses_are_not(pods, kind):
    found = cluster("pods", EnvoySettings(**NEEDED | {"pods": pods}))
    addresses = [
        host["endpoint"]["address"]["socket_address"]
        for host in found["load_assignment"]["endpoints"][0]["lb_endpoints"]
    ]

    assert found["type"] == kind
    assert [entry["address"] for entry in addresses] == [pod.rpartition(":")[0].strip("[]") for pod in pods]


@pytest.mark.parametrize("name", ["pods", "plugin", "gateway_http"])
def test_one_late_answer_takes_nobody_away_and_the_last_one_stays(name):
    found = cluster(name, EnvoySettings(**NEEDED))
    (check,) = found["health_checks"]

    assert (check["timeout"], check["unhealthy_threshold"], check["healthy_threshold"]) == ("2s", 2, 1)
    assert found["common_lb_config"] == {"healthy_panic_threshold": {"value": 1.0}, "update_merge_window": "0s"}
    outlier = found.get("outlier_detection", {"max_ejection_percent": 0, "always_eject_one_host": False})
    assert outlier["max_ejection_percent"] <= 50
    assert outlier["always_eject_one_host"] is False


def test_the_pod_is_chosen_by_what_no_client_can_write():
    policy = cluster("pods", EnvoySettings(**NEEDED))["load_balancing_policy"]["policies"][0]["typed_extension_config"]

    assert policy["typed_config"]["override_host_sources"] == [
        {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}
    ]


def test_nothing_of_an_answer_goes_through_the_plugin():
    (listener,) = bootstrap(EnvoySettings(**NEEDED))["static_resources"]["listeners"]
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    mode = next(found for found in filters if found["name"].endswith("ext_proc"))["typed_config"]["processing_mode"]

    assert [mode[f"response_{part}_mode"] for part in ("header", "body", "trailer")] == ["SKIP", "NONE", "SKIP"]


def test_options_win_over_the_file_and_make_the_same_bootstrap(tmp_path, capsys):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(NEEDED | {"listen_port": 1, "drain_delay_s": 7}))

    assert main(["bootstrap", "--settings", str(path), "--listen-port", "2", "--fail-open-stateless", "false"]) == 0
    expected = EnvoySettings(**NEEDED, listen_port=2, drain_delay_s=7, fail_open_stateless=False)
    assert yaml.safe_load(capsys.readouterr().out) == bootstrap(expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--gateways"),
        ([*OPTIONS, "--admin-host", "0.0.0.0"], "loopback only"),
        ([*OPTIONS, "--pods", "x"], "--pods"),
    ],
)
def test_settings_that_cannot_be_right_are_named(options, named, capsys):
    assert main(["bootstrap", *options]) == 2
    assert named in capsys.readouterr().err


def test_the_keeper_finds_in_the_bootstrap_what_it_has_to_know(tmp_path, capsys):
    main(["bootstrap", *OPTIONS, "--concurrency", "3", "--drain-delay-s", "0", "--drain-timeout-s", "1.5"])
    path = tmp_path / "envoy.yaml"
    path.write_text(capsys.readouterr().out)
    command = envoy_command(path, admin_file=tmp_path / "admin")

    assert KeeperSettings.of(path) == KeeperSettings(
        concurrency=3, drain_delay_s=0, drain_timeout_s=1.5, metrics_listen=""
    )
    assert command[command.index("--concurrency") + 1] == "3"


@pytest.mark.parametrize("text", ["", "admin: {}", "node: []", "node: {metadata: {concurrency: x}}", "{", "node: 1"])
def test_a_file_that_is_no_bootstrap_of_ours_is_named(tmp_path, text):
    path = tmp_path / "envoy.yaml"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"envoy\.yaml is not a bootstrap"):
        KeeperSettings.of(path)
