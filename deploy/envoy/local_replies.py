"""What Envoy answers by itself, in the gateway's error shape. Answers of pods and of the plugin are never touched.

The plugin's answers too are local replies to Envoy, so every rule names the details of the replies it means.
"""

from __future__ import annotations

from typing import Any, ClassVar

import grpc

from contextcache.error_body import error_body
from contextcache.errors import BodyTooLarge, ContextCacheError, EngineFailed, InvalidRequest, NoReadyEndpoint
from deploy.envoy.routes import CONTROL, TYPE
from deploy.envoy.settings import EnvoySettings
from gateway.paths import PathNotFound


class GatewayUnavailable(ContextCacheError):
    """No gateway answers, and the request may not pass without one."""

    code: ClassVar[str] = "gateway_unavailable"
    http_status: ClassVar[int] = 503
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNAVAILABLE


def local_reply_config(settings: EnvoySettings) -> dict[str, Any]:
    """Return Envoy's `local_reply_config`; the first rule that matches answers."""
    too_large = BodyTooLarge(f"the request body is over the limit of {settings.max_body_bytes} bytes")
    away = GatewayUnavailable("no gateway is available", retry_after_s=1)
    no_pod = NoReadyEndpoint("no pod can be reached", retry_after_s=1)
    busy = NoReadyEndpoint("the proxy carries as much as it may", retry_after_s=1)
    rules: list[tuple[str, ContextCacheError]] = [
        (_one_of("request_payload_too_large"), too_large),
        (_one_of("direct_response", "route_not_found") + " && response.code == 404", PathNotFound("no such path")),
        (_begins("ext_proc_error"), away),
        (f"xds.route_name == '{CONTROL}' && ({_UNREACHED} || {_BROKEN})", away),
        (_UNREACHED, no_pod),
        (_BROKEN, EngineFailed("the engine broke off")),
        (_begins("overload"), busy),
        (_begins("http1.") + " && response.code == 400", InvalidRequest("the request is not HTTP as it should be")),
    ]
    return {"mappers": [_mapper(expression, error) for expression, error in rules]}


def _one_of(*details: str) -> str:
    return f"response.code_details in {list(details)!r}"


def _begins(prefix: str) -> str:
    return f"response.code_details.startsWith('{prefix}')"


_UNREACHED = (
    "(response.code_details in ['no_healthy_upstream', 'cluster_not_found'] || "
    "response.code_details.startsWith('upstream_reset_before_response_started{connection_failure') || "
    "response.code_details.startsWith('upstream_reset_before_response_started{remote_connection_failure') || "
    "response.code_details.startsWith('upstream_reset_before_response_started{overflow'))"
)
_BROKEN = (
    "(response.code_details.startsWith('upstream_reset_before_response_started') || "
    "response.code_details in ['upstream_response_timeout', 'upstream_per_try_timeout', 'stream_idle_timeout'])"
)


def _mapper(expression: str, error: ContextCacheError) -> dict[str, Any]:
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
        "status_code": error.http_status,
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
