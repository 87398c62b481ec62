"""Which way a request takes through Envoy: by method and path as spelled, and whether a header names a context.

The routes repeat `gateway.paths.kind_of`, and a test holds the two together. Envoy normalises nothing: a path that is
not plainly spelled, or has a percent sign, matches no route of ours and is 404. The HTTP front answers a plainly
spelled unknown path and names the nearest known one.
"""

from __future__ import annotations

import re
from typing import Any

from contextcache.claim import SESSION_HEADER, TURN_PATHS
from contextcache.names import MINTED_PREFIX
from gateway.envoy.settings import EnvoySettings, duration
from gateway.paths import (
    CONSOLE_PATH,
    CONTEXT_CHANGES,
    CONTEXT_PATH,
    ENGINE_CALLS,
    METRICS_PATH,
    MODEL_PATH,
    READ_METHODS,
    READ_PATHS,
    ROOT_PATH,
)
from gateway.tenants.keys import KEY_HEADERS

PODS = "pods"
"""Cluster of the vLLM pods."""
GATEWAY_HTTP = "gateway_http"
"""Cluster of the gateways' HTTP fronts."""
GATEWAY_STREAMS = "gateway_streams"
"""Cluster of the same fronts, for requests with a streamed body and a long answer."""
EXT_PROC = "envoy.filters.http.ext_proc"
API_KEYS = "api-keys"
"""The filter that checks keys, where there are any; see `api_keys`."""
TYPE = "type.googleapis.com/envoy."
LUA = f"{TYPE}extensions.filters.http.lua.v3"

FRONT_PATHS = ("/healthz", "/readyz", "/openapi.json", CONSOLE_PATH)
"""Answered by the HTTP front without a key. Its /metrics are for whoever reaches the process itself."""

CONTROL = "control"
CONSOLE = "console"
CREATE = "create"
TURN = "turn"
COMPLETION = "completion"
STATELESS = "stateless"
NOT_FOUND = "not_found"
PREFLIGHT = "preflight"

SHOWN_BYTES_MAX = 1 << 20
"""Size from which request bodies pass through the gateways' HTTP fronts, as do bodies that do not say their size.

Envoy holds smaller bodies whole, for the plugin, which has counted their bytes by then. The rest streams through Envoy.
A message of the plugin's is held three to four times while it is read, on one event loop.
"""

_CONTROL_TIMEOUT_S = 9.0
"""Deadline of a control call's answer, and limit of a silence in its upload. The deadlines of a manager (2 s) and of
sidecars (5 s for a delete) fit in."""
_INT64_MAX = (1 << 63) - 1

_NOT_DOT = r"[A-Za-z0-9_~!$&'()*+,;=:@-]"
_ANY = r"[A-Za-z0-9_~!$&'()*+,;=:@.-]"
SEGMENT = rf"(?:\.?\.?{_NOT_DOT}{_ANY}*|\.\.\.{_ANY}*)"
"""A path segment in plain characters that is neither `.` nor `..`; RE2 has no look-ahead."""
_SLASH = "(?:/|%2[Ff])"
"""Between the parts of a model's name: OpenAI's client escapes it."""


def routes(settings: EnvoySettings) -> list[dict[str, Any]]:
    """Return the routes in the order in which Envoy tries them; the last one takes everything."""
    to_pod = _to_pod(settings)
    to_front = {
        "cluster": GATEWAY_HTTP,
        "timeout": duration(_CONTROL_TIMEOUT_S),
        "idle_timeout": duration(_CONTROL_TIMEOUT_S),
        "retry_policy": _RETRIES,
    }
    post = _method("POST")
    fail_open = settings.fail_open_stateless
    by_header = {"name": SESSION_HEADER, "string_match": {"prefix": MINTED_PREFIX}}
    # Each path by itself: a regular expression of all of them is larger than Envoy takes.
    with_body = [
        *((TURN, {**_path(path), "headers": [*post, by_header]}, False) for path in _COMPLETIONS),
        *((CREATE, {**match, "headers": post}, False) for match in _either(CONTEXT_PATH)),
        *((COMPLETION, {**_path(path), "headers": post}, fail_open) for path in _COMPLETIONS),
        *((STATELESS, {**_path(path), "headers": post}, fail_open) for path in _POSTED),
    ]
    listed = (*_NOT_POSTED, *settings.engine_paths)
    with_body += [(STATELESS, _call(call), fail_open) for call in listed if call.startswith(_METHODS_WITH_BODY)]
    bodiless = [_call(call) for call in listed if not call.startswith(_METHODS_WITH_BODY)]
    bytes_max = collected_bytes_max(settings)
    shown = {"name": "content-length", "range_match": {"start": 0, "end": bytes_max}}
    large = {**shown, "range_match": {"start": bytes_max, "end": _INT64_MAX}}
    streamed = {**to_pod, "cluster": GATEWAY_STREAMS}
    found = [
        # Envoy's filter answers for the pages it knows, and takes its policy from routes to somewhere alone.
        _public(_route(PREFLIGHT, {"prefix": "/", "headers": _ASKED_FIRST}, to_front, plugin=False)),
        *(
            _collected(_route(name, _also(match, shown), to_pod | _rewritten(match), fail_open=may_pass), settings)
            for name, match, may_pass in with_body
        ),
        *(_route(name, match, streamed | _rewritten(match), plugin=False) for name, match, _ in with_body),
        *(_route(CONTROL, match, to_front, plugin=False) for match in _CONTROL_MATCHES),
        *(_public(_route(CONTROL, match, to_front, plugin=False)) for path in FRONT_PATHS for match in _either(path)),
        *(_public(_route(CONSOLE, _call(f"{method} {ROOT_PATH}"), to_front, plugin=False)) for method in READ_METHODS),
        _public(_route(CONSOLE, _regex(f"{CONSOLE_PATH}/{SEGMENT}"), to_front, plugin=False)),
        *(_not_found(_path(path)) for path in (METRICS_PATH, f"{METRICS_PATH}/")),
        _public(_route(NOT_FOUND, _regex(rf"(?i){re.escape(CONTEXT_PATH)}(?:/{SEGMENT})*/?"), to_front, plugin=False)),
        # Any other spelling of our own namespace: the pod must not see it either.
        _not_found(_regex(rf"(?i){re.escape(CONTEXT_PATH)}(/.*)?")),
        # These calls usually have no body. A body without a content-length gets 413 above the limit of collected bytes.
        *(_route(STATELESS, _also(match, large), streamed, plugin=False) for match in bodiless),
        *(_collected(_route(STATELESS, match, to_pod, fail_open=fail_open), settings) for match in bodiless),
        _public(_route(NOT_FOUND, _regex(f"(?:/{SEGMENT})+/?"), to_front, plugin=False)),
        _not_found({"prefix": ""}),
    ]
    if not settings.api_keys_file:
        return found  # a key may be for the engine
    # Ours end here, also while every gateway is away; the router takes them off, behind the filter that reads them.
    ends = {"request_headers_to_remove": sorted(KEY_HEADERS)}
    return [route | (ends if route.get("route", {}).get("cluster") == PODS else {}) for route in found]


def collected_bytes_max(settings: EnvoySettings) -> int:
    """Return the size from which a body is streamed."""
    return min(SHOWN_BYTES_MAX, settings.max_body_bytes)


def _collected(route: dict[str, Any], settings: EnvoySettings) -> dict[str, Any]:
    """Have Envoy hold a request's body whole up to this size; more is 413."""
    return {**route, "request_body_buffer_limit": collected_bytes_max(settings)}


def _also(match: dict[str, Any], header: dict[str, Any]) -> dict[str, Any]:
    return {**match, "headers": [*match["headers"], header]}


def _path(path: str) -> dict[str, Any]:
    return {"path": path}


def _either(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Match a path of ours with and without a slash at its end."""
    return _path(path), _path(f"{path}/")


def _rewritten(match: dict[str, Any]) -> dict[str, str]:
    """Take the slash off for the pod: it knows the bare path alone."""
    path = str(match["path"])
    return {"prefix_rewrite": path.removesuffix("/")} if path.endswith("/") else {}


def _method(name: str) -> list[dict[str, Any]]:
    return [{"name": ":method", "string_match": {"exact": name}}]


def _call(call: str) -> dict[str, Any]:
    method, _, path = call.partition(" ")
    return {**_path(path), "headers": _method(method)}


def _regex(pattern: str) -> dict[str, Any]:
    return {"safe_regex": {"regex": pattern}}


_ASKED_FIRST = [*_method("OPTIONS"), {"name": "access-control-request-method", "present_match": True}]
_METHODS_WITH_BODY = ("POST ", "PUT ", "PATCH ")
_COMPLETIONS = sorted(TURN_PATHS)
_POSTED = sorted({call.removeprefix("POST ") for call in ENGINE_CALLS if call.startswith("POST ")} - TURN_PATHS)
_NOT_POSTED = sorted(call for call in ENGINE_CALLS if not call.startswith("POST "))
_CONTROL_MATCHES = [
    *(match for path in (CONTEXT_PATH, *sorted(READ_PATHS)) for match in _either(path)),
    _regex(rf"{re.escape(CONTEXT_PATH)}/{SEGMENT}(?:/(?:{'|'.join(CONTEXT_CHANGES)}))?/?"),
    _regex(rf"{re.escape(MODEL_PATH)}/{SEGMENT}(?:{_SLASH}{SEGMENT})*/?"),
]
_RETRIES = {
    # Only what no server has begun to work on: a completion is never sent twice.
    "retry_on": "connect-failure,refused-stream,reset-before-request",
    "num_retries": 3,
    "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.25s"},
    "retry_host_predicate": [
        {
            "name": "envoy.retry_host_predicates.previous_hosts",
            "typed_config": {"@type": f"{TYPE}extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"},
        }
    ],
    "host_selection_retry_max_attempts": 5,
}


def _to_pod(settings: EnvoySettings) -> dict[str, Any]:
    return {
        "cluster": PODS,
        "timeout": duration(settings.total_timeout_s),
        "idle_timeout": duration(settings.idle_timeout_s),
        "retry_policy": _RETRIES,
    }


def _route(
    name: str, match: dict[str, Any], action: dict[str, Any], *, plugin: bool = True, fail_open: bool = False
) -> dict[str, Any]:
    per_route = {"overrides": {"failure_mode_allow": fail_open}} if plugin else {"disabled": True}
    return {
        "name": name,
        "match": match,
        "route": action,
        "typed_per_filter_config": {
            EXT_PROC: {"@type": f"{TYPE}extensions.filters.http.ext_proc.v3.ExtProcPerRoute", **per_route}
        },
    }


def _not_found(match: dict[str, Any]) -> dict[str, Any]:
    # The body comes from `local_replies`. The plugin is not asked.
    return _public(
        {
            "name": NOT_FOUND,
            "match": match,
            "direct_response": {"status": 404},
            "typed_per_filter_config": {
                EXT_PROC: {"@type": f"{TYPE}extensions.filters.http.ext_proc.v3.ExtProcPerRoute", "disabled": True}
            },
        }
    )


def _public(route: dict[str, Any]) -> dict[str, Any]:
    """Ask for no key, as the gateway asks for none here."""
    per_filter = {**route["typed_per_filter_config"], API_KEYS: {"@type": f"{LUA}.LuaPerRoute", "disabled": True}}
    return {**route, "typed_per_filter_config": per_filter}
