"""gRPC options, deadlines and errors. Both ends of a call raise the same class of error.

Trailing metadata (`contextcache-code`, `contextcache-detail-bin`) carries a `ContextCacheError`. Imports grpcio only,
because it is loaded inside vLLM too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc
import grpc.aio

from contextcache.errors import ERRORS_BY_CODE, ContextCacheError

Answer = TypeVar("Answer")

CODE_KEY = "contextcache-code"
DETAIL_KEY = "contextcache-detail-bin"
FRAME_BYTES = 1 << 20
"""Largest piece of a block file in one message."""
MAX_MESSAGE_BYTES = 64 << 20
"""Largest unary message: a manifest or transcript of 10 million tokens, at 5 bytes each, is smaller."""

_MANAGER = "contextcache.v1.ContextManagerService"


def _asked_again(*statuses: str, method: str = "") -> dict[str, Any]:
    """Return gRPC's retry policy for the manager's calls: after 0.02, 0.04 and 0.08 s, within the deadline."""
    retry = {"maxAttempts": 4, "initialBackoff": "0.02s", "maxBackoff": "0.08s", "backoffMultiplier": 2}
    name = {"service": _MANAGER} | ({"method": method} if method else {})
    return {"name": [name], "retryPolicy": retry | {"retryableStatusCodes": list(statuses)}}


# gRPC's retry design (proposal A6). A stopping manager cancels calls that it has not begun (seen at every second
# rollout under eight callers); another replica answers them. All calls are idempotent except the
# delete: a second delete finds nothing, so only a cancelled one is retried.
_SERVICE_CONFIG = {
    # A name may resolve to several managers: every address gets calls.
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        _asked_again("UNAVAILABLE", "CANCELLED"),
        _asked_again("CANCELLED", method="UnregisterSessionCache"),
    ],
}
_ANSWERED: tuple[str, str | bytes] = ("grpc-retry-pushback-ms", "-1")
"""Metadata of our own errors: gRPC must not retry them."""

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Reconnects to a restarted peer within a second. gRPC's default is up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Detects a vanished peer after 17 s, also behind a proxy that acknowledges. By default gRPC waits a minute for a
    # ping's answer, and pings only during calls.
    ("grpc.keepalive_time_ms", 12_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # Resolves a name again within a second. gRPC's default is half a minute, in which a rollout may replace all
    # addresses.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # Loopback and pod-to-pod calls never go through an HTTP proxy.
    ("grpc.enable_http_proxy", 0),
]


GRACE_S = 0.25
"""Time after a call's deadline until its caller stops waiting for gRPC, which ends most calls itself by then.

gRPC 1.85 ends no call while the kernel accepts no more of its request: the server is stopped, and the request is larger
than the socket's buffer.
"""


def late_call() -> grpc.aio.AioRpcError:
    """Return the error of a call that gRPC did not end at its deadline."""
    none = grpc.aio.Metadata()
    details = "the request was not sent before its deadline"
    return grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, none, none, details=details)


async def within(call: Awaitable[Answer], timeout_s: float) -> Answer:
    """Return a call's answer; `timeout_s` is its deadline. Raises `late_call` after `GRACE_S` more."""
    try:
        async with asyncio.timeout(timeout_s + GRACE_S):
            return await call
    except TimeoutError as exc:
        raise late_call() from exc


async def answer_of(call: Awaitable[Answer], timeout_s: float, *, unavailable: type[ContextCacheError]) -> Answer:
    """Return a call's answer. Raises the error that the server raised; `unavailable` without an answer of ours."""
    try:
        return await within(call, timeout_s)
    except grpc.RpcError as exc:
        raise error_from_rpc(exc, unavailable=unavailable) from exc


def error_from_rpc(exc: grpc.RpcError, *, unavailable: type[ContextCacheError]) -> ContextCacheError:
    """Return the error that the server raised; `unavailable` if it sent none of ours.

    Raise it `from exc`. gRPC's text of a failed connection names inner addresses, so only `cause_of` returns it.
    """
    metadata = _metadata(exc)
    code = metadata.get(CODE_KEY)
    error_class = ERRORS_BY_CODE.get(code) if isinstance(code, str) else None
    if error_class is None:
        return unavailable(f"no answer from an inner service: {exc.code().name.lower()}", retry_after_s=1)
    detail = _detail(metadata.get(DETAIL_KEY))
    return error_class(
        exc.details() or exc.code().name, param=detail.get("param"), retry_after_s=detail.get("retry_after_s")
    )


def is_unanswered(error: ContextCacheError) -> bool:
    """Return whether a call failed without an answer of the server."""
    cause = error.__cause__
    return isinstance(cause, grpc.RpcError) and CODE_KEY not in _metadata(cause)


def is_late(error: ContextCacheError) -> bool:
    """Return whether a call exceeded its deadline. The server may have received it, and may answer the next one."""
    cause = error.__cause__
    return isinstance(cause, grpc.RpcError) and cause.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def cause_of(error: ContextCacheError) -> str:
    """Return gRPC's text of a failed call, for our log and never for a client; empty for other errors."""
    cause = error.__cause__
    return str(cause.details() or "") if isinstance(cause, grpc.RpcError) else ""


def status_of(error: ContextCacheError) -> grpc.StatusCode:
    """Return the gRPC status of an error."""
    return grpc.StatusCode[error.grpc_status]


def error_metadata(error: ContextCacheError) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata from which the client raises the same error."""
    detail = json.dumps({"param": error.param, "retry_after_s": error.retry_after_s}).encode()
    return ((CODE_KEY, error.code), (DETAIL_KEY, detail), _ANSWERED)


def _metadata(exc: grpc.RpcError) -> dict[str, str | bytes]:
    pairs: Any = exc.trailing_metadata() or ()
    return dict(pairs)


def _detail(raw: str | bytes | None) -> dict[str, Any]:
    try:
        parsed = json.loads(raw or b"{}")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
