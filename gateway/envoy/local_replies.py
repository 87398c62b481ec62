"""What Envoy answers by itself, in the gateway's error shape. Answers of pods and of the plugin are never touched.

The plugin's answers too are local replies to Envoy, so every rule names the details of the replies it means.
"""

from __future__ import annotations

from typing import Any

from contextcache.errors import (
    BodyTooLarge,
    ContextCacheError,
    EngineFailed,
    GatewayUnavailable,
    InvalidRequest,
    NoReadyEndpoint,
    PathNotFound,
    error_body,
)
from gateway.envoy.routes import GATEWAY_HTTP, GATEWAY_STREAMS, NOT_FOUND, TYPE, collected_bytes_max
from gateway.envoy.settings import EnvoySettings


def local_reply_config(settings: EnvoySettings) -> dict[str, Any]:
    """Return Envoy's `local_reply_config`; the first rule that matches answers."""
    # The gateway itself refuses bodies with a content-length, and calls that are known to have a body.
    bytes_max = collected_bytes_max(settings)
    too_large = BodyTooLarge(f"the body of a request without Content-Length is over the limit of {bytes_max} bytes")
    away = GatewayUnavailable("no gateway is available", retry_after_s=1)
    busy = NoReadyEndpoint("the proxy has reached its limit of requests or memory", retry_after_s=1)
    slow = InvalidRequest("the rest of the request did not arrive before the upload deadline")
    # Envoy took them, and then not ours beside them.
    crowded = InvalidRequest("the request has too many headers, or headers that are too long")
    return {
        "mappers": [
            _mapper(_details("request_payload_too_large"), too_large),
            _mapper(_details("direct_response", "route_not_found"), PathNotFound("no such path")),
            # The front would name the nearest path; without it, the path is no less unknown.
            _mapper(f"xds.route_name == '{NOT_FOUND}' && ({_UNREACHED} || {_BROKEN})", PathNotFound("no such path")),
            _mapper(_details("ext_proc_error*"), away),
            _mapper(
                f"xds.cluster_name in ['{GATEWAY_HTTP}', '{GATEWAY_STREAMS}'] && ({_UNREACHED} || {_BROKEN})", away
            ),
            _mapper(_UNREACHED, NoReadyEndpoint("no pod can be reached", retry_after_s=1)),
            _mapper(_BROKEN, EngineFailed("the engine closed the connection before its answer ended")),
            _mapper(_details("overload*"), busy),
            _mapper(_details("request_overall_timeout", "request_header_timeout"), slow),
            _mapper(_details("header_mutation_result_exceeds_limit"), crowded),
            # The status says more than we could; only the shape is ours.
            _mapper(_MALFORMED, InvalidRequest("the request is not valid HTTP"), keep_status=True),
        ]
    }


def _details(*details: str) -> str:
    """Return an expression for replies with these details; a star at the end stands for anything."""
    begins = [f"response.code_details.startsWith('{found[:-1]}')" for found in details if found.endswith("*")]
    equals = [f"response.code_details == '{found}'" for found in details if not found.endswith("*")]
    return f"({' || '.join([*equals, *begins])})"


_UNREACHED = _details(
    "no_healthy_upstream",
    "cluster_not_found",
    "upstream_reset_before_response_started{connection_failure*",
    "upstream_reset_before_response_started{remote_connection_failure*",
    "upstream_reset_before_response_started{local_connection_failure*",
    "upstream_reset_before_response_started{connection_timeout*",
    "upstream_reset_before_response_started{overflow*",
)
_BROKEN = _details(
    "upstream_reset_before_response_started*", "response_timeout", "upstream_per_try_timeout", "stream_idle_timeout"
)
_MALFORMED = _details(
    "http1.*",
    "low_version",
    "missing_host_header",
    "path_normalization_failed",
    "request_headers_too_large",
    "upgrade_failed",
)


def _mapper(expression: str, error: ContextCacheError, *, keep_status: bool = False) -> dict[str, Any]:
    body = error_body(error).decode().replace("%", "%%")
    found: dict[str, Any] = {
        "filter": {
            "extension_filter": {
                "name": "envoy.access_loggers.extension_filters.cel",
                "typed_config": {
                    "@type": f"{TYPE}extensions.access_loggers.filters.cel.v3.ExpressionFilter",
                    "expression": expression,
                },
            }
        },
        **({} if keep_status else {"status_code": error.http_status}),
        "body_format_override": {"text_format_source": {"inline_string": body}, "content_type": "application/json"},
    }
    if error.retry_after_s is not None:
        found["headers_to_add"] = [
            {
                "header": {"key": "retry-after", "value": str(error.retry_after_s)},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ]
    return found
