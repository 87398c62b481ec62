"""The only tree of errors. A class has a stable code, and the HTTP and gRPC status that carries it. Pure.

Rules: an adapter maps a foreign exception once (`raise X(...) from exc`). A message never holds prompt text, token ids
or keys. A cache fault is never the client's fault: recompute and count.

deploy/client_sources.py makes the client's classes from the public ones. Their first lines are the meanings in
docs/reference/errors.md.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar


class ContextCacheError(Exception):
    """A fault of the gateway."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    """Name of a gRPC status: this module imports no wire library (wire/rpc.py looks it up)."""
    is_public: ClassVar[bool] = True
    """Whether a client can get the code; False: only processes of ours exchange it."""

    def __init_subclass__(  # type: ignore[explicit-override]  # a build loads this file without typing-extensions
        cls, *, code: str = "", http: int = 0, grpc: str = "", public: bool | None = None, **others: Any
    ) -> None:
        """Set the class attributes that a subclass does not inherit."""
        super().__init_subclass__(**others)
        cls.code = code or cls.code
        cls.http_status = http or cls.http_status
        cls.grpc_status = grpc or cls.grpc_status
        cls.is_public = cls.is_public if public is None else public

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        """`param`: the request field at fault (OpenAI's `error.param`). `retry_after_s` becomes `Retry-After`."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(ContextCacheError, code="invalid_request", http=400, grpc="INVALID_ARGUMENT"):
    """The request is malformed. `param` names the field. For invalid JSON, the message has line and column."""


class ModelMismatch(InvalidRequest, code="model_mismatch"):
    """The context belongs to another model."""


class HistoryAmbiguous(InvalidRequest, code="history_ambiguous"):
    """The messages may be the whole conversation or new ones: set `context_mode`, or omit the system prompt."""


class PreviousResponseNotFound(InvalidRequest, code="previous_response_not_found"):
    """`previous_response_id` is unknown, expired, replaced or not stored: send the whole conversation."""


class TtlOutOfRange(InvalidRequest, code="ttl_out_of_range"):
    """`ttl` is outside the deployment's bounds."""


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """The conversation does not fit the model's window, even after truncation where the turn asks for it."""


class Unauthorized(ContextCacheError, code="invalid_api_key", http=401, grpc="UNAUTHENTICATED"):
    """The API key is missing or unknown. `WWW-Authenticate` names the scheme."""


class ForgedIdentity(Unauthorized, code="invalid_identity", public=False):
    """A signed token has a wrong signature, purpose or expiry."""


class OperatorOnly(ContextCacheError, code="operator_only", http=403, grpc="PERMISSION_DENIED"):
    """The API key is valid, but not an operator's."""


class ContextNotFound(ContextCacheError, code="context_not_found", http=404, grpc="NOT_FOUND"):
    """The context does not exist, was deleted, or belongs to another tenant: one answer for all three."""


class PathNotFound(ContextCacheError, code="not_found", http=404, grpc="NOT_FOUND"):
    """The path does not exist, or the gateway does not pass this call of the engine."""


class ModelNotFound(ContextCacheError, code="model_not_found", http=404, grpc="NOT_FOUND"):
    """No pod serves the model."""


class MethodNotAllowed(ContextCacheError, code="method_not_allowed", http=405, grpc="UNIMPLEMENTED"):
    """The path has other methods. `Allow` lists them."""

    def __init__(self, message: str, *, allow: str = "") -> None:
        super().__init__(message)
        self.allow = allow


class UploadTooSlow(ContextCacheError, code="upload_too_slow", http=408, grpc="DEADLINE_EXCEEDED"):
    """The body stopped coming, or comes at less than 32 KiB a second."""


class ContextBusy(ContextCacheError, code="context_busy", http=409, grpc="ABORTED"):
    """Another turn runs on the context. `Retry-After` says when to try again."""


class ContextExists(ContextCacheError, code="context_exists", http=409, grpc="ALREADY_EXISTS"):
    """The `session_id` is taken."""


class GenerationMismatch(ContextCacheError, code="generation_mismatch", http=409, grpc="FAILED_PRECONDITION"):
    """The context is not at the generation of `If-Match`."""


class GenerationGone(ContextCacheError, code="generation_gone", http=409, grpc="FAILED_PRECONDITION"):
    """The generation to go back to was replaced by a later turn, or does not exist yet."""


class AlreadyAnswered(ContextCacheError, code="idempotency_key_in_use", http=409, grpc="ALREADY_EXISTS"):
    """A request with this key was answered, and its stored answer has just expired."""


class AnswerNotKept(ContextCacheError, code="answer_not_kept", http=409, grpc="FAILED_PRECONDITION"):
    """The request was committed before, and its answer was too large to store."""


class ContextExpired(ContextCacheError, code="context_expired", http=410, grpc="NOT_FOUND"):
    """The context's `ttl` has ended. An hour later the answer is `context_not_found`."""


class BodyTooLarge(ContextCacheError, code="body_too_large", http=413, grpc="RESOURCE_EXHAUSTED"):
    """The body exceeds 32 MiB, or the deployment's limit."""


class IdempotencyKeyReused(ContextCacheError, code="idempotency_key_reused", http=422, grpc="INVALID_ARGUMENT"):
    """The idempotency key belongs to another request."""


class TenantRateExceeded(ContextCacheError, code="rate_limit_exceeded", http=429, grpc="RESOURCE_EXHAUSTED"):
    """The tenant exceeds its request rate. `Retry-After` says when to try again."""


class TooManyInFlight(ContextCacheError, code="too_many_in_flight", http=429, grpc="RESOURCE_EXHAUSTED"):
    """The tenant has too many requests or bytes in flight, or exceeds its share of busy pods."""


class ContextQuotaExceeded(ContextCacheError, code="context_quota_exceeded", http=429, grpc="RESOURCE_EXHAUSTED"):
    """The tenant has reached its limit of contexts, Redis bytes or KV bytes. The message names it. Delete contexts."""


class EndpointsSaturated(ContextCacheError, code="endpoints_saturated", http=429, grpc="RESOURCE_EXHAUSTED"):
    """Every pod has too many waiting requests. `Retry-After` says when to try again."""


class EngineFailed(ContextCacheError, code="engine_error", http=502, grpc="INTERNAL"):
    """The engine failed before it answered."""


class NoReadyEndpoint(ContextCacheError, code="no_ready_endpoint", http=503, grpc="UNAVAILABLE"):
    """No pod is ready for the model, or the gateway is at its limits."""


class GatewayUnavailable(ContextCacheError, code="gateway_unavailable", http=503, grpc="UNAVAILABLE"):
    """Envoy reaches no gateway that could find the context. Requests without a context still pass."""


class DeadlineExceeded(ContextCacheError, code="deadline_exceeded", http=503, grpc="UNAVAILABLE"):
    """The gateway behind Envoy did not route the request in time."""


class StoreUnavailable(ContextCacheError, code="store_unavailable", http=503, grpc="UNAVAILABLE"):
    """The context manager or Redis is unreachable. Requests without a context still pass."""


class LeaseLost(ContextCacheError, code="lease_lost", http=409, grpc="FAILED_PRECONDITION", public=False):
    """The lease ended and another turn may have begun: the manager refuses the commit."""


class SidecarUnavailable(ContextCacheError, code="sidecar_unavailable", http=503, grpc="UNAVAILABLE"):
    """A sidecar does not answer in time, so a kept conversation may be unknown. Turns recompute instead."""


class CacheRefNotFound(ContextCacheError, code="cache_ref_not_found", http=404, grpc="NOT_FOUND", public=False):
    """The tenant has no sealed, unexpired manifest under this cache_ref. A miss: recompute."""


class CacheRefPending(CacheRefNotFound, code="cache_ref_pending"):
    """A save or a pull of the KV is in flight. Poll for a bounded time; after that it is a miss."""


class FingerprintMismatch(
    ContextCacheError, code="fingerprint_mismatch", http=409, grpc="FAILED_PRECONDITION", public=False
):
    """Another model, layout or build made the KV. A miss: recompute."""


class ContextDeleted(ContextCacheError, code="context_deleted", http=409, grpc="ABORTED", public=False):
    """The cache_ref or session of a save was deleted meanwhile: the sidecar refuses the save and keeps nothing."""


class SaveIncomplete(ContextCacheError, code="save_incomplete", http=409, grpc="FAILED_PRECONDITION", public=False):
    """A seal lacks blocks, or its save was never prepared: the sidecar writes no manifest."""


class CorruptBlock(ContextCacheError, code="corrupt_block", http=500, grpc="DATA_LOSS", public=False):
    """A block file has a wrong checksum, token ids or fingerprint. The sidecar sets it aside and never serves it."""


class KeyNotAtHand(CorruptBlock, code="key_not_at_hand"):
    """An object of the shared store does not decrypt: the key is missing, or bytes were changed. A miss."""


class StorageFull(ContextCacheError, code="storage_full", http=507, grpc="RESOURCE_EXHAUSTED", public=False):
    """No room within the limits for another block: the sidecar drops the save and counts it."""


def _family(cls: type[ContextCacheError]) -> dict[str, type[ContextCacheError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        found |= _family(child)
    return found


ERRORS_BY_CODE = _family(ContextCacheError)
"""Every class of this module by its code, so that the receiver of a code raises the same class."""


def error_of(status: int, body: Any, *, retry_after_s: int | None = None) -> ContextCacheError:
    """Return the error that another process answered: by our code, else by its status, where a 4xx stays a 4xx."""
    told = body.get("error") if isinstance(body, dict) else None
    told = told if isinstance(told, dict) else {}
    kind = ERRORS_BY_CODE.get(str(told.get("code")))
    if kind is None:
        kind = ModelNotFound if status == 404 else InvalidRequest if 400 <= status < 500 else EngineFailed
    param = told.get("param")
    message = str(told.get("message") or f"the pod answered with status {status}")
    return kind(message, param=param if isinstance(param, str) else None, retry_after_s=retry_after_s)


def error_body(error: ContextCacheError) -> bytes:
    """Return `{"type": "error", "error": {"message", "type", "code", "param"}, "detail": message}` as JSON.

    One body holds OpenAI's form, Anthropic's (the first `type`) and the EP's (`detail`), whatever the path.
    """
    return json.dumps({"type": "error", "error": error_object(error), "detail": error.message}).encode()


def error_object(error: ContextCacheError) -> dict[str, str | None]:
    """Return the object `error` of a body and of a stream's event."""
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
