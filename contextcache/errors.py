"""One tree of errors. Each class carries its stable code and the HTTP and gRPC status it travels under. Pure.

Rules: foreign exceptions are mapped once, in the adapter that meets them (`raise X(...) from exc`); messages
never hold prompt text, token ids or keys; a cache fault is never the client's fault (recompute and count).
"""

from __future__ import annotations

import json
from typing import ClassVar


class ContextCacheError(Exception):
    """Base of the family.

    `grpc_status` is the name of a status of gRPC's: this file imports no wire (wire/rpc.py looks it up). `param` names
    the request field at fault (OpenAI's `error.param`); `retry_after_s` becomes `Retry-After`.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(ContextCacheError):
    """The request is malformed; nothing was stored."""

    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class ModelMismatch(InvalidRequest):
    """The context belongs to another model than the request names."""

    code = "model_mismatch"


class HistoryAmbiguous(InvalidRequest):
    """Messages that may be the whole conversation or new in it: the client has to say which."""

    code = "history_ambiguous"


class PreviousResponseNotFound(InvalidRequest):
    """Nothing is kept of the response that the request goes on from. OpenAI's code: agents recover by it."""

    code = "previous_response_not_found"


class TtlOutOfRange(InvalidRequest):
    """The ttl is outside the deployment's bounds; it is never clamped."""

    code = "ttl_out_of_range"


class ContextLengthExceeded(InvalidRequest):
    """Context plus new text do not fit the model's window."""

    code = "context_length_exceeded"


class Unauthorized(ContextCacheError):
    """No API key, or one nobody owns."""

    code = "invalid_api_key"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class ForgedIdentity(Unauthorized):
    """A signed token whose signature, purpose or expiry is wrong."""

    code = "invalid_identity"


class OperatorOnly(ContextCacheError):
    """The key is good, and not an operator's."""

    code = "operator_only"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class ContextNotFound(ContextCacheError):
    """Absent, deleted, or another tenant's: one answer for all three."""

    code = "context_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class ModelNotFound(ContextCacheError):
    """The engine serves no model of that name."""

    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class ContextBusy(ContextCacheError):
    """Another turn holds the lease."""

    code = "context_busy"
    http_status = 409
    grpc_status = "ABORTED"


class ContextExists(ContextCacheError):
    """A live context already has the id."""

    code = "context_exists"
    http_status = 409
    grpc_status = "ALREADY_EXISTS"


class GenerationMismatch(ContextCacheError):
    """The context has moved on from the generation the caller named."""

    code = "generation_mismatch"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class GenerationGone(ContextCacheError):
    """The generation was replaced since, is too long ago, or is still to come: nobody can go back to it."""

    code = "generation_gone"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class AlreadyAnswered(ContextCacheError):
    """A request under this idempotency key was answered before: its answer is given again, nothing is run."""

    code = "idempotency_key_in_use"
    http_status = 409
    grpc_status = "ALREADY_EXISTS"


class AnswerNotKept(ContextCacheError):
    """A request was answered and committed before, and its answer was too large to be kept."""

    code = "answer_not_kept"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class IdempotencyKeyReused(ContextCacheError):
    """The idempotency key stands for another request."""

    code = "idempotency_key_reused"
    http_status = 422
    grpc_status = "INVALID_ARGUMENT"


class LeaseLost(ContextCacheError):
    """The caller's lease ended and another turn may have begun: its commit is refused."""

    code = "lease_lost"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class ContextExpired(ContextCacheError):
    """The context's TTL has ended; remembered for an hour, then it is simply not found."""

    code = "context_expired"
    http_status = 410
    grpc_status = "NOT_FOUND"


class BodyTooLarge(ContextCacheError):
    """The request body is over the limit."""

    code = "body_too_large"
    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"


class UploadTooSlow(ContextCacheError):
    """The request body stopped coming, or comes so slowly that it is not waited for."""

    code = "upload_too_slow"
    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"


class ContextQuotaExceeded(ContextCacheError):
    """The tenant holds all it may."""

    code = "context_quota_exceeded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class TenantRateExceeded(ContextCacheError):
    """The tenant asks faster than its share."""

    code = "rate_limit_exceeded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class TooManyInFlight(ContextCacheError):
    """The tenant has as many requests, or bytes of them, in hand as it may at one time."""

    code = "too_many_in_flight"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class EndpointsSaturated(ContextCacheError):
    """Every pod that could take the request has more waiting than it may."""

    code = "endpoints_saturated"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class EngineFailed(ContextCacheError):
    """The engine broke off or answered with something that is no answer."""

    code = "engine_error"
    http_status = 502
    grpc_status = "INTERNAL"


class NoReadyEndpoint(ContextCacheError):
    """No pod is ready to take the request."""

    code = "no_ready_endpoint"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class GatewayUnavailable(ContextCacheError):
    """No gateway answers Envoy, and the request may not pass without one. Said by Envoy, or by the pod it reached."""

    code = "gateway_unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class StoreUnavailable(ContextCacheError):
    """The context manager or its Redis cannot be reached in time."""

    code = "store_unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class SidecarUnavailable(ContextCacheError):
    """The kv-sidecar cannot be reached in time. Never a client's error: recompute."""

    code = "sidecar_unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class CacheRefNotFound(ContextCacheError):
    """No sealed, unexpired manifest under this cache_ref for this tenant. A miss: recompute."""

    code = "cache_ref_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class CacheRefPending(CacheRefNotFound):
    """The KV is being saved or pulled: worth asking again, for a bounded time. Given up on, it is a miss."""

    code = "cache_ref_pending"


class FingerprintMismatch(ContextCacheError):
    """The KV was made by another model, layout or build. A miss: recompute."""

    code = "fingerprint_mismatch"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class ContextDeleted(ContextCacheError):
    """A save under a cache_ref or session that was deleted meanwhile: refused, nothing is kept."""

    code = "context_deleted"
    http_status = 409
    grpc_status = "ABORTED"


class SaveIncomplete(ContextCacheError):
    """Seal without all blocks, or for a save that was never prepared: no manifest is written."""

    code = "save_incomplete"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class CorruptBlock(ContextCacheError):
    """A block file whose checksum, token ids or fingerprint is not what it must be: put aside, never served."""

    code = "corrupt_block"
    http_status = 500
    grpc_status = "DATA_LOSS"


class KeyNotAtHand(CorruptBlock):
    """An object of the shared store that does not open: a key that is not here, or bytes that were changed. A miss."""

    code = "key_not_at_hand"


class StorageFull(ContextCacheError):
    """No room for another block within the limits: the save is dropped and counted."""

    code = "storage_full"
    http_status = 507
    grpc_status = "RESOURCE_EXHAUSTED"


def _family(cls: type[ContextCacheError]) -> dict[str, type[ContextCacheError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        found |= _family(child)
    return found


ERRORS_BY_CODE = _family(ContextCacheError)
"""Every class of the tree by its code, so that the other end of a wire raises the same class."""


def error_body(error: ContextCacheError) -> bytes:
    """Return `{"type": "error", "error": {"message", "type", "code", "param"}, "detail": message}` as JSON.

    OpenAI's, Anthropic's (the first `type`) and the EP's (`detail`) in one, whatever the path.
    """
    return json.dumps({"type": "error", "error": error_object(error), "detail": error.message}).encode()


def error_object(error: ContextCacheError) -> dict[str, str | None]:
    """Return what an error says, as it stands in a body and in a stream's events."""
    return {
        "message": error.message,
        "type": _openai_type(error.http_status),
        "code": error.code,
        "param": error.param,
    }


def _openai_type(http_status: int) -> str:
    if http_status >= 500:
        return "server_error"
    return {401: "authentication_error", 429: "rate_limit_error"}.get(http_status, "invalid_request_error")


def error_headers(error: ContextCacheError) -> list[tuple[str, str]]:
    """Return the headers that go with `error_body`."""
    headers = [("content-type", "application/json")]
    if error.retry_after_s is not None:
        headers.append(("retry-after", str(error.retry_after_s)))
    return headers
