"""What an Envoy can be told, by its variables, and what its bootstrap then says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.envoy.__main__ import main
from gateway.envoy.keys import discovered
from gateway.envoy.render import duration, write_folder
from gateway.envoy.settings import EnvoySettings
from tests.kit.envoy_names import bootstrap, secrets

NEEDED = {"gateways": ["127.0.0.1:1,127.0.0.1:2"], "pods": ["127.0.0.1:3"]}
VARIABLES = {"ENVOY_GATEWAYS": '["127.0.0.1:1,127.0.0.1:2"]', "ENVOY_PODS": '["127.0.0.1:3"]'}


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
    with pytest.raises(ValidationError, match="must be a loopback address"):
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
    # An HTTP front that answers nothing is the exception, and one that answers that it is not ready is none.
    threshold = 0.0 if name == "gateway_http" else 1.0
    assert found["common_lb_config"] == {"healthy_panic_threshold": {"value": threshold}, "update_merge_window": "0s"}
    outlier = found.get("outlier_detection", {"max_ejection_percent": 0, "always_eject_one_host": False})
    assert outlier["max_ejection_percent"] <= 50
    assert outlier["always_eject_one_host"] is False


def test_the_pod_is_chosen_by_what_no_client_can_write():
    policy = cluster("pods", EnvoySettings(**NEEDED))["load_balancing_policy"]["policies"][0]["typed_extension_config"]

    assert policy["typed_config"]["override_host_sources"] == [
        {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}
    ]


def test_nothing_of_an_answer_goes_through_the_plugin():
    listener, _ = bootstrap(EnvoySettings(**NEEDED))["static_resources"]["listeners"]
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    mode = next(found for found in filters if found["name"].endswith("ext_proc"))["typed_config"]["processing_mode"]

    assert [mode[f"response_{part}_mode"] for part in ("header", "body", "trailer")] == ["SKIP", "NONE", "SKIP"]


@pytest.fixture
def told(monkeypatch):
    """Set variables of Envoy's."""

    def tell(**variables: str):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return tell


def test_its_variables_say_all_of_it(tmp_path, told):
    told(**VARIABLES, ENVOY_CONFIG_DIR=str(tmp_path), ENVOY_LISTEN_PORT="2", ENVOY_FAIL_OPEN_STATELESS="false")

    assert main(["bootstrap"]) == 0
    expected = EnvoySettings(**NEEDED, listen_port=2, fail_open_stateless=False, config_dir=str(tmp_path))
    assert json.loads((tmp_path / "envoy.json").read_text()) == bootstrap(expected)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, "ENVOY_GATEWAYS"),
        (VARIABLES | {"ENVOY_ADMIN_HOST": "0.0.0.0"}, "must be a loopback address"),
        (VARIABLES | {"ENVOY_PODS": '["x"]'}, "ENVOY_PODS"),
        (VARIABLES | {"ENVOY_PODS": "127.0.0.1:3"}, "pods"),
        (VARIABLES | {"ENVOY_METRICS_LISTEN": "0.0.0.0:9090", "ENVOY_ADMIN_PORT": "0"}, "admin_port"),
    ],
)
def test_variables_that_cannot_be_right_are_named(variables, named, told, capsys):
    told(**variables)

    with pytest.raises(SystemExit, match="2"):
        main(["bootstrap"])
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["run"], ["bootstrap", "x"]])
def test_a_command_that_there_is_not_is_refused_with_those_there_are(arguments, capsys):
    assert main(arguments) == 2
    assert "envoy attend" in capsys.readouterr().err


TLS = {"tls_cert_file": "/a/tls.crt", "tls_key_file": "/a/tls.key", "tls_ca_file": "/b/ca.crt"}
LISTEN = {"listen_cert_file": "/c/tls.crt", "listen_key_file": "/c/tls.key"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tls_cert_file": "/a/tls.crt"}, "belong together"),
        (TLS | {"tls_ca_file": ""}, "belong together"),
        ({"listen_key_file": "/a/tls.key"}, "belong together"),
        (TLS | {"tls_key_file": "/elsewhere/tls.key"}, "in the same folder"),
        (TLS | {"tls_key_file": "a/tls.key"}, "must be an absolute path"),
        ({"metrics_listen": "9090"}, "must be host:port"),
        ({"traces_endpoint": "otel:4317"}, "must be http://host:port"),
        ({"traces_endpoint": "http://otel:4317/v1/traces"}, "must be http://host:port"),
        ({"traces_endpoint": "http://otel:70000"}, "Port out of range"),
    ],
)
def test_files_and_addresses_that_cannot_be_right_are_refused(more, message):
    with pytest.raises(ValidationError, match=message):
        EnvoySettings(**NEEDED, **more)


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5s"), (0.5, "0.5s"), (600.0, "600s"), (1234567, "1234567s"), (0.0625, "0.062s")]
)
def test_a_duration_is_as_envoy_reads_it(seconds, text):
    assert duration(seconds) == text


def test_every_cluster_of_ours_gets_certificates_and_each_secret_a_file():
    settings = EnvoySettings(**NEEDED, **TLS, **LISTEN, config_dir="/sds")
    protocols = {
        name: cluster(name, settings)["transport_socket"]["typed_config"]["common_tls_context"]["alpn_protocols"]
        for name in ("pods", "plugin", "gateway_http")
    }
    files = secrets(settings)
    named = set(re.findall(r"/sds/([a-z-]+\.json)", json.dumps(bootstrap(settings))))

    assert protocols == {"pods": ["http/1.1"], "plugin": ["h2"], "gateway_http": ["http/1.1"]}
    assert named == set(files) == {"own-certificate.json", "trusted-ca.json", "listen-certificate.json"}
    assert all(len(file["resources"]) == 1 for file in files.values())


def test_each_certificate_is_read_again_when_its_own_folder_changes():
    found = [file["resources"][0] for file in secrets(EnvoySettings(**NEEDED, **TLS, **LISTEN)).values()]
    watched = [
        next(part["watched_directory"]["path"] for part in secret.values() if isinstance(part, dict))
        for secret in found
    ]

    assert watched == ["/a", "/b", "/c"]


def test_without_certificates_there_is_no_tls_anywhere():
    assert secrets(EnvoySettings(**NEEDED)) == {}
    assert "transport_socket" not in json.dumps(bootstrap(EnvoySettings(**NEEDED)))


def files_in(folder: Path) -> dict[str, str]:
    """Write what stands for certificates and return the settings that name them."""
    found = {name: str(folder / Path(path).name) for name, path in TLS.items()}
    for path in found.values():
        Path(path).touch()
    return found


@pytest.mark.parametrize("name", [*TLS, *LISTEN])
def test_a_certificate_that_is_not_there_is_named(name, tmp_path):
    there = files_in(tmp_path) | {
        "listen_cert_file": str(tmp_path / "tls.crt"),
        "listen_key_file": str(tmp_path / "tls.key"),
    }
    settings = EnvoySettings(**NEEDED, **there, config_dir=str(tmp_path))
    missing = str(tmp_path / "elsewhere")

    with pytest.raises(ValueError, match=f"ENVOY_{name.upper()}: file {missing}"):
        write_folder(settings.model_copy(update={name: missing}))


def test_a_folder_gets_the_bootstrap_and_what_it_names(tmp_path):
    (tmp_path / "keys.json").write_text('{"keys": []}')
    keys_file = str(tmp_path / "keys.json")
    settings = EnvoySettings(**NEEDED, **files_in(tmp_path), config_dir=str(tmp_path / "made"), api_keys_file=keys_file)
    path = write_folder(settings)
    written = {
        str(file.relative_to(path.parent)): json.loads(file.read_text())
        for file in path.parent.rglob("*")
        if file.is_file()
    }

    assert path.name == "envoy.json"
    assert written == {
        "envoy.json": bootstrap(settings),
        "keys/filter.json": discovered(()),
        **secrets(settings),
    }


@pytest.mark.parametrize(
    ("endpoint", "host", "port", "tls"),
    [
        ("http://otel", "otel", 4317, False),
        ("https://otel.example:443", "otel.example", 443, True),
        ("http://[::1]:4318", "::1", 4318, False),
    ],
)
def test_a_collector_is_where_its_address_says(endpoint, host, port, tls):
    found = cluster("traces", EnvoySettings(**NEEDED, traces_endpoint=endpoint))
    (member,) = found["load_assignment"]["endpoints"][0]["lb_endpoints"]

    assert member["endpoint"]["address"]["socket_address"] == {"address": host, "port_value": port}
    assert ("transport_socket" in found) is tls


def test_a_collector_is_believed_by_the_ca_that_is_named_for_it():
    found = cluster("traces", EnvoySettings(**NEEDED, traces_endpoint="https://otel", traces_ca_file="/ca/otel.crt"))
    context = found["transport_socket"]["typed_config"]["common_tls_context"]

    assert context["validation_context"]["trusted_ca"] == {"filename": "/ca/otel.crt"}


def test_without_a_collector_nothing_is_traced():
    text = json.dumps(bootstrap(EnvoySettings(**NEEDED)))

    assert "tracing" not in text
    assert "opentelemetry" not in text
