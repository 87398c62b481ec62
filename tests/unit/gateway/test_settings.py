"""What a gateway refuses to be started with."""

import pytest
from pydantic import ValidationError

from gateway.app import _load_limits
from gateway.pods.state import Endpoint, LoadLimits
from gateway.pods.static import endpoint_of
from gateway.settings import GatewaySettings, is_loopback

POD = {"name": "pod-a", "url": "http://127.0.0.1:8001/", "sidecar": "127.0.0.1:50061"}


def settings(**fields) -> GatewaySettings:
    return GatewaySettings(**{"endpoints": [POD], "secret_file": "secret", **fields})


def test_endpoints_come_from_json_in_the_environment(monkeypatch):
    monkeypatch.setenv("GATEWAY_ENDPOINTS", '[{"name": "a", "url": "http://a:8001"}]')
    monkeypatch.setenv("GATEWAY_SECRET_FILE", "secret")
    monkeypatch.setenv("GATEWAY_API_KEYS_FILE", "")
    monkeypatch.setenv("GATEWAY_ENGINE_PATHS", '["GET /version"]')
    found = GatewaySettings()

    assert [(pod.name, pod.url, pod.sidecar) for pod in found.endpoints] == [("a", "http://a:8001", "")]
    assert found.api_keys_file is None
    assert found.engine_paths == ("GET /version",)


def test_origins_are_those_that_a_browser_writes(monkeypatch):
    monkeypatch.setenv("GATEWAY_CORS_ORIGINS", '["https://chat.example.com", "http://localhost:5173"]')

    assert settings().cors_origins == ("https://chat.example.com", "http://localhost:5173")


@pytest.mark.parametrize(
    "origin", ["*", "https://*.example.com", "https://a.example/", "a.example", "https://A.example"]
)
def test_an_origin_that_no_browser_writes_is_refused(origin):
    with pytest.raises(ValidationError, match="cors_origins"):
        settings(cors_origins=[origin])


def test_an_endpoints_url_loses_its_slash():
    assert settings().endpoints[0].url == "http://127.0.0.1:8001"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example", ""])
def test_without_keys_only_loopback_is_bound(host):
    with pytest.raises(ValidationError, match="loopback only"):
        settings(host=host)

    assert settings(host=host, api_keys_file="keys.json").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_keys(host):
    assert is_loopback(host)
    assert settings(host=host).api_keys_file is None


@pytest.mark.parametrize(
    "endpoints",
    [[], [POD, POD], [{"name": "a b", "url": "http://a"}], [{"name": "a", "url": "a:80"}], [{**POD, "surprise": 1}]],
)
def test_endpoints_that_cannot_be_right_are_refused(endpoints):
    with pytest.raises(ValidationError):
        settings(endpoints=endpoints)


def test_pods_come_from_one_source_only():
    assert settings(endpoints=[], endpoints_file="pods.json").endpoints == ()
    assert settings(endpoints=[], kubernetes_service_selector="a=b").endpoints == ()
    with pytest.raises(ValidationError, match="set exactly one of GATEWAY_ENDPOINTS"):
        settings(kubernetes_service_selector="a=b")
    with pytest.raises(ValidationError, match="set exactly one of GATEWAY_ENDPOINTS"):
        settings(endpoints_file="pods.json")
    with pytest.raises(ValidationError, match="set exactly one of GATEWAY_ENDPOINTS"):
        settings(endpoints=[], endpoints_file="")


def test_without_keys_the_external_processor_listens_on_loopback_only():
    for listen in ("0.0.0.0:9002", "[::]:9002", "gateway.example:9002"):
        with pytest.raises(ValidationError, match="loopback only"):
            settings(ext_proc_listen=listen)
        assert settings(ext_proc_listen=listen, api_keys_file="keys.json").ext_proc_listen == listen

    for listen in ("", "127.0.0.1:0", "[::1]:9002", "localhost:9002"):
        assert settings(ext_proc_listen=listen).ext_proc_listen == listen


@pytest.mark.parametrize("listen", ["9002", ":9002", "127.0.0.1", "127.0.0.1:grpc"])
def test_an_external_processor_has_a_host_and_a_port(listen):
    with pytest.raises(ValidationError):
        settings(ext_proc_listen=listen, api_keys_file="keys.json")


def test_a_pod_has_everything_its_settings_say():
    found = settings(endpoints=[{**POD, "draining": True}]).endpoints[0]

    assert endpoint_of(found) == Endpoint("pod-a", "http://127.0.0.1:8001", "127.0.0.1:50061", draining=True)


def test_what_counts_as_busy_is_the_operators_to_say():
    found = settings(saturated_waiting=3, saturated_kv_usage=0.5, shed_waiting=9)

    assert _load_limits(found) == LoadLimits(saturated_waiting=3, saturated_kv_usage=0.5, shed_waiting=9)
