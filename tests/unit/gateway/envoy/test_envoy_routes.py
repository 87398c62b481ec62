"""Envoy's routes say what `gateway.paths.kind_of` says, for every method and every spelling of a path."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contextcache.errors import MethodNotAllowed, PathNotFound
from gateway.envoy.render import FRONT_PATHS, SHOWN_BYTES_MAX
from gateway.envoy.settings import EnvoySettings
from gateway.paths import Kind, kind_of, methods_of
from gateway.settings import GatewaySettings
from tests.kit.engine_calls import known_calls
from tests.kit.envoy_names import API_KEYS, EXT_PROC, GATEWAY_HTTP, GATEWAY_STREAMS, PODS, bootstrap, routes

SETTINGS = EnvoySettings(
    gateways=["127.0.0.1:1,127.0.0.1:2"], pods=["127.0.0.1:3"], engine_paths=["GET /version", "PUT /v1/a/b"]
)
ROUTES = routes(SETTINGS)
ROUTER = "envoy.filters.http.router"
ENGINE_PATHS = frozenset(SETTINGS.engine_paths)

PIECES = [
    "/v1",
    "/V1",
    "/context",
    "/contexts",
    "/Context",
    "/completions",
    "/chat",
    "/models",
    "/conversations",
    "/items",
    "/responses",
    "/input_items",
    "/",
    "//",
    "/.",
    "/..",
    "/...",
    "/.a",
]
PIECES += ["%2e", "%2F", "\\", ";", " ", "a", "ü", "-", "_", "/healthz", "/metrics", "/health", "/tokenize", "/console"]
KNOWN = [path.replace("{", "").replace("}", "") for _, path in known_calls()]
paths = st.one_of(
    st.sampled_from([*KNOWN, "/v1/a/b"]),
    st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
    st.text(max_size=20).map("/v1/".__add__),
)


def matches(match: dict, method: str, path: str, headers: set[str], size_bytes: int) -> bool:
    """Match as Envoy does: a regex has to match the whole path; its classes are ASCII. `size_bytes` -1: not said."""
    for header in match.get("headers", ()):
        if header["name"] == ":method":
            if header["string_match"]["exact"] != method:
                return False
        elif header["name"] == "content-length":
            if not header["range_match"]["start"] <= size_bytes < header["range_match"]["end"]:
                return False
        elif header["name"] not in headers:
            return False
    if "path" in match:
        return match["path"] == path
    if "safe_regex" in match:
        return re.fullmatch(match["safe_regex"]["regex"], path, re.ASCII | re.DOTALL) is not None
    return path.startswith(match["prefix"])


def route_of(method: str, path: str, *, headers: set[str] = frozenset(), size_bytes: int = 0) -> dict:
    return next(route for route in ROUTES if matches(route["match"], method, path, headers, size_bytes))


def expected(method: str, path: str) -> str:
    if path == "/metrics":
        return "not_found"
    if path.startswith("/v1/models/"):
        path = re.sub("%2f", "/", path, flags=re.IGNORECASE)  # as the front reads it
    try:
        kind = kind_of(method, path, ENGINE_PATHS)
    except PathNotFound:
        return "not_found"
    except MethodNotAllowed:
        return "not_found" if methods_of(path, ENGINE_PATHS) else "control"
    if kind is Kind.OWN:
        return "console" if path == "/" or path.removesuffix("/").startswith("/console/") else "control"
    return kind.value


@given(method=st.sampled_from(["GET", "POST", "DELETE"]), path=paths)
@example(method="GET", path="/metrics")
@example(method="GET", path="/metrics/")
@example(method="GET", path="/v1/%63ontext")
def test_what_is_not_found_here_reaches_nothing_in_the_front_that_answers_for_it(method, path):
    """The front would read `%63`, and it has metrics that are not for everybody: such paths end at Envoy."""
    route = route_of(method, path)
    if route["name"] == "not_found" and "route" in route:
        assert route["route"]["cluster"] == GATEWAY_HTTP
        assert "%" not in path
        with pytest.raises((PathNotFound, MethodNotAllowed)):
            kind_of(method, path, ENGINE_PATHS)


@pytest.mark.parametrize("size_bytes", [10, 32 << 20])
def test_a_slash_at_the_end_of_a_create_reaches_no_pod(size_bytes):
    assert route_of("POST", "/v1/context/", size_bytes=size_bytes)["route"]["prefix_rewrite"] == "/v1/context"
    assert "prefix_rewrite" not in route_of("POST", "/v1/context", size_bytes=size_bytes)["route"]


@given(method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]), path=paths)
@example(method="POST", path="/v1/context")
@example(method="POST", path="/v1/CONTEXT")
@example(method="GET", path="/v1/context/ctx_1/fork")
@example(method="GET", path="/v1/context/..")
@example(method="GET", path="/")
@example(method="POST", path="/")
@example(method="POST", path="/v1/chat/completions\n")
@example(method="POST", path="/v1/context/")
@example(method="GET", path="/v1/models/org%2Fmodel/")
@example(method="GET", path="/v1/models/org/model")
@example(method="GET", path="/console/")
def test_a_request_takes_the_way_that_the_gateway_says_it_has(method, path):
    assert route_of(method, path)["name"] == expected(method, path)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_session_in_a_header_makes_a_completion_one_that_needs_the_plugin(path):
    assert route_of("POST", path, headers={"x-session-id"})["name"] == "turn"
    assert route_of("GET", path, headers={"x-session-id"})["name"] == "not_found"


@pytest.mark.parametrize("size_bytes", [-1, SHOWN_BYTES_MAX, 32 << 20])
@pytest.mark.parametrize("headers", [set(), {"x-session-id"}])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/context"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/audio/transcriptions"),
        ("PUT", "/v1/a/b"),
    ],
)
def test_a_large_body_goes_through_a_gateway_that_holds_it_once(method, path, headers, size_bytes):
    """In a message of the plugin's it is held three to four times; so much for what does not say its size."""
    small, large = (
        route_of(method, path, headers=headers, size_bytes=size) for size in (SHOWN_BYTES_MAX - 1, size_bytes)
    )

    assert small["route"]["cluster"] == PODS
    assert large["route"] == {**small["route"], "cluster": GATEWAY_STREAMS}


def test_envoy_holds_no_body_whole_that_the_plugin_is_not_asked_about_first():
    for settings in (SETTINGS, SETTINGS.model_copy(update={"max_body_bytes": 1000})):
        held = [route for route in routes(settings) if "request_body_buffer_limit" in route]

        assert {route["request_body_buffer_limit"] for route in held} == {min(SHOWN_BYTES_MAX, settings.max_body_bytes)}
        assert all("overrides" in route["typed_per_filter_config"][EXT_PROC] for route in held)
    filters = bootstrap(SETTINGS)["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    assert [found["name"] for found in filters["http_filters"]] == ["envoy.filters.http.cors", EXT_PROC, ROUTER]


def test_a_call_without_a_body_as_a_rule_may_have_one():
    small, large = (route_of("GET", "/v1/models", size_bytes=size) for size in (SHOWN_BYTES_MAX - 1, SHOWN_BYTES_MAX))

    assert (small["route"]["cluster"], large["route"]["cluster"]) == (PODS, GATEWAY_STREAMS)


def test_what_asks_for_no_body_goes_to_a_pod():
    assert route_of("GET", "/v1/models", size_bytes=-1)["route"]["cluster"] == PODS


def failure_mode(name: str, settings: EnvoySettings = SETTINGS) -> set[bool]:
    """Return whether the routes of a name let a request pass while the plugin is away."""
    found = [route["typed_per_filter_config"][EXT_PROC] for route in routes(settings) if route["name"] == name]
    return {route["overrides"]["failure_mode_allow"] for route in found if "overrides" in route}


@pytest.mark.parametrize("name", ["create", "turn"])
def test_what_claims_a_context_never_passes_without_the_plugin(name):
    assert failure_mode(name) == {False}


@pytest.mark.parametrize("name", ["completion", "stateless"])
def test_what_claims_no_context_passes_without_the_plugin_unless_it_shall_not(name):
    assert failure_mode(name) == {True}
    assert failure_mode(name, SETTINGS.model_copy(update={"fail_open_stateless": False})) == {False}


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "HEAD"])
def test_every_call_of_the_engine_takes_the_way_that_the_gateway_says_it_has(method):
    ways = {path: route_of(method, path)["name"] for path in KNOWN}

    assert ways == {path: expected(method, path) for path in KNOWN}


def test_envoy_and_gateway_know_the_same_engine_paths():
    assert EnvoySettings.model_fields["engine_paths"].default == GatewaySettings.model_fields["engine_paths"].default


def test_no_bootstrap_speaks_of_origins_unless_told_to():
    told = SETTINGS.model_copy(update={"cors_origins": ("https://chat.example.com",)})

    assert "access-control-allow" not in str(bootstrap(SETTINGS))
    assert "https://chat.example.com" in str(bootstrap(told))


def test_the_front_s_metrics_are_not_for_clients():
    assert "/metrics" not in FRONT_PATHS


def test_a_key_is_asked_for_wherever_the_gateway_asks_for_one():
    """The filter looks at every route that does not turn it off."""
    public = [route for route in ROUTES if API_KEYS in route["typed_per_filter_config"]]

    assert {route["name"] for route in public} == {"preflight", "control", "console", "not_found"}
    paths = [route["match"]["path"] for route in public if route["name"] == "control"]
    assert paths == [f"{path}{end}" for path in FRONT_PATHS for end in ("", "/")]
