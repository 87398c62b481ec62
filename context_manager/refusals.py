"""The errors that the manager answers. Pure.

The message of "not found" is one fixed sentence: absent, deleted and another tenant's sessions cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from contextcache import errors
from contextcache.errors import ContextCacheError, InvalidRequest, StoreUnavailable
from contextcache.names import NO_CONTEXT

_KEY = "Idempotency-Key"

_BY_CODE: Mapping[str, Callable[[int], ContextCacheError]] = {
    "absent": lambda _: errors.ContextNotFound(NO_CONTEXT, param="session_id"),
    "expired": lambda _: errors.ContextExpired("the context has expired", param="session_id"),
    "exists": lambda _: errors.ContextExists("a context with this id exists already", param="session_id"),
    "lease_lost": lambda _: errors.LeaseLost("the turn's lease has ended or belongs to another turn"),
    "damaged": lambda _: damaged(),
    "answered": lambda _: errors.AlreadyAnswered(
        "a request under this key was answered before", param=_KEY, retry_after_s=1
    ),
    "key_reused": lambda _: errors.IdempotencyKeyReused(
        "this idempotency key was used for a different request", param=_KEY
    ),
    # Rounded up, and never "retry at once".
    "busy": lambda remaining_ms: errors.ContextBusy(
        "another turn of this context is running", retry_after_s=max(1, -(-remaining_ms // 1000))
    ),
    "generation": lambda current: errors.GenerationMismatch(f"the context is at generation {current}"),
    "gone": lambda current: errors.GenerationGone(
        f"generation is not part of the context, which is at generation {current}", param="generation"
    ),
    "keep": lambda num_segments: errors.InvalidRequest(
        f"the transcript has {num_segments} segments", param="keep_segments"
    ),
    "quota": lambda contexts_max: errors.ContextQuotaExceeded(
        f"the tenant has reached its limit of {contexts_max} contexts"
    ),
    "bytes": lambda bytes_max: errors.ContextQuotaExceeded(
        f"the tenant's transcripts and stored answers have reached the limit of {bytes_max} bytes "
        "(MANAGER_TENANT_BYTES_MAX): delete contexts, or wait until some expire"
    ),
}


def refusal(code: str, number: int = 0) -> ContextCacheError:
    """Return the error of a script's refusal and of the number that comes with it."""
    return _BY_CODE[code](number)


def unknown_after() -> InvalidRequest:
    """Return the error of a page that should start after an unknown session."""
    return InvalidRequest("`after` names no context of this list", param="after")


def damaged() -> ContextCacheError:
    """Return the error of a row that cannot be read, or of a transcript shorter than its row says."""
    return ContextCacheError("the stored context is damaged")


def unavailable() -> StoreUnavailable:
    """Return the error of a store that did not answer in time."""
    return StoreUnavailable("no connection to the session store", retry_after_s=1)
