"""What may go wrong, as classes by `code`: one for each that docs/reference/errors.md lists."""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

if TYPE_CHECKING:
    from contextcache.client.types import Reply


class ClientError(Exception):
    """Base of all that this client raises. It goes through `pickle` with all its fields, from process to process."""

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Have it made again from its fields: what it is called with says them in other words."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]  # not in typeshed


class ConnectionFailed(ClientError):
    """Nobody answered in time, after every retry: whether something happened there is not known.

    A create or a turn sent again under the same idempotency key happens once.
    """


class NotUnderstood(ClientError):
    """An answer that is none of this API's, or larger than any: somebody else answers there, or a far newer release."""


class BrokenStream(ClientError):
    """A streamed answer ended before its end. The turn was not committed, or its end was lost on the way.

    `text`: what had come. Ask under the same idempotency key, or read the context's generation, before repeating it.
    """

    def __init__(self, message: str, *, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class NotCreated(ClientError):
    """A create was answered, and its context is not there: `reply.usage.context.reason` says why.

    `store_unavailable`: it may be there all the same, under `reply.session_id`.
    """

    def __init__(self, message: str, *, reply: Reply) -> None:
        super().__init__(message)
        self.reply = reply
        """The whole answer."""


class ApiError(ClientError):
    """An answer that is an error, with everything its body said."""

    code: ClassVar[str] = ""
    """Of the class; `said_code` is the answer's own, which may be one that this release does not know."""

    def __init__(
        self, message: str, *, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        """`headers`: of the answer, names in lower case."""
        super().__init__(message)
        headers = headers or {}
        error = body.get("error")
        said: Mapping[str, Any] = error if isinstance(error, Mapping) else {}
        self.message = message
        self.status = status
        self.body = body
        """The whole JSON body; empty where it was none."""
        self.said_code = str(said.get("code") or "")
        self.param: str | None = said.get("param")
        """The field of the request at fault."""
        self.request_id = headers.get("x-request-id", "")
        """To look it up by in the server's logs."""
        self.retry_after_s = _seconds(headers.get("retry-after"))
        """When to come again; None: the answer does not say."""


class InvalidRequest(ApiError):
    """The request is malformed. `param` names the field. For invalid JSON, the message has line and column."""

    code = "invalid_request"


class HistoryAmbiguous(ApiError):
    """The messages may be the whole conversation or new ones: set `context_mode`, or omit the system prompt."""

    code = "history_ambiguous"


class PreviousResponseNotFound(ApiError):
    """`previous_response_id` is unknown, expired, replaced or not stored: send the whole conversation."""

    code = "previous_response_not_found"


class ModelMismatch(ApiError):
    """The context belongs to another model."""

    code = "model_mismatch"


class TtlOutOfRange(ApiError):
    """`ttl` is outside the deployment's bounds."""

    code = "ttl_out_of_range"


class ContextLengthExceeded(ApiError):
    """The conversation does not fit the model's window, even after truncation where the turn asks for it."""

    code = "context_length_exceeded"


class InvalidApiKey(ApiError):
    """The API key is missing or unknown. `WWW-Authenticate` names the scheme."""

    code = "invalid_api_key"


class OperatorOnly(ApiError):
    """The API key is valid, but not an operator's."""

    code = "operator_only"


class ContextNotFound(ApiError):
    """The context does not exist, was deleted, or belongs to another tenant: one answer for all three."""

    code = "context_not_found"


class NotFound(ApiError):
    """The path does not exist, or the gateway does not pass this call of the engine."""

    code = "not_found"


class ModelNotFound(ApiError):
    """No pod serves the model."""

    code = "model_not_found"


class MethodNotAllowed(ApiError):
    """The path has other methods. `Allow` lists them."""

    code = "method_not_allowed"


class UploadTooSlow(ApiError):
    """The body stopped coming, or comes at less than 32 KiB a second."""

    code = "upload_too_slow"


class ContextBusy(ApiError):
    """Another turn runs on the context. `Retry-After` says when to try again."""

    code = "context_busy"


class ContextExists(ApiError):
    """The `session_id` is taken."""

    code = "context_exists"


class GenerationMismatch(ApiError):
    """The context is not at the generation of `If-Match`."""

    code = "generation_mismatch"


class GenerationGone(ApiError):
    """The generation to go back to was replaced by a later turn, or does not exist yet."""

    code = "generation_gone"


class IdempotencyKeyInUse(ApiError):
    """A request with this key was answered, and its stored answer has just expired."""

    code = "idempotency_key_in_use"


class AnswerNotKept(ApiError):
    """The request was committed before, and its answer was too large to store."""

    code = "answer_not_kept"


class ContextExpired(ApiError):
    """The context's `ttl` has ended. An hour later the answer is `context_not_found`."""

    code = "context_expired"


class BodyTooLarge(ApiError):
    """The body exceeds 32 MiB, or the deployment's limit."""

    code = "body_too_large"


class IdempotencyKeyReused(ApiError):
    """The idempotency key belongs to another request."""

    code = "idempotency_key_reused"


class RateLimitExceeded(ApiError):
    """The tenant exceeds its request rate. `Retry-After` says when to try again."""

    code = "rate_limit_exceeded"


class TooManyInFlight(ApiError):
    """The tenant has too many requests or bytes in flight, or exceeds its share of busy pods."""

    code = "too_many_in_flight"


class ContextQuotaExceeded(ApiError):
    """The tenant has reached its limit of contexts, Redis bytes or KV bytes. The message names it. Delete contexts."""

    code = "context_quota_exceeded"


class EndpointsSaturated(ApiError):
    """Every pod has too many waiting requests. `Retry-After` says when to try again."""

    code = "endpoints_saturated"


class InternalError(ApiError):
    """A fault of the gateway."""

    code = "internal_error"


class EngineError(ApiError):
    """The engine failed before it answered."""

    code = "engine_error"


class NoReadyEndpoint(ApiError):
    """No pod is ready for the model, or the gateway is at its limits."""

    code = "no_ready_endpoint"


class GatewayUnavailable(ApiError):
    """Envoy reaches no gateway that could find the context. Requests without a context still pass."""

    code = "gateway_unavailable"


class DeadlineExceeded(ApiError):
    """Behind Envoy, the gateway did not route the request in time."""

    code = "deadline_exceeded"


class StoreUnavailable(ApiError):
    """The context manager or Redis is unreachable. Requests without a context still pass."""

    code = "store_unavailable"


BY_CODE: Mapping[str, type[ApiError]] = {cls.code: cls for cls in ApiError.__subclasses__()}


def api_error(status: int, body: object, headers: Mapping[str, str], *, way: str = "") -> ApiError:
    """Return the error that an answer with a bad status is, whatever its body is.

    `way`: how the server was asked, told where the body does not say that the server itself answered.
    """
    parsed: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
    error = parsed.get("error")
    said: Mapping[str, Any] = error if isinstance(error, Mapping) else {}
    cls = BY_CODE.get(str(said.get("code")), ApiError)
    message = str(said.get("message") or f"the server answered with HTTP status {status}{way}")
    return cls(message, status=status, body=parsed, headers=headers)


def _seconds(text: str | None) -> float | None:
    with contextlib.suppress(ValueError):
        return max(0.0, float(text)) if text is not None else None
    return None  # a date, which no gateway of ours sends
