"""What the manager says when it says no: one place, so that every store answers alike. Pure.

The not-found message is one fixed sentence: absent, deleted and another tenant's cannot be told apart.
"""

from __future__ import annotations

from contextcache.errors import (
    AlreadyAnswered,
    ContextBusy,
    ContextCacheError,
    ContextExists,
    ContextExpired,
    ContextNotFound,
    ContextQuotaExceeded,
    GenerationGone,
    GenerationMismatch,
    IdempotencyKeyReused,
    InvalidRequest,
    LeaseLost,
    StoreUnavailable,
)
from contextcache.names import NO_CONTEXT

_KEY = "Idempotency-Key"


def not_found() -> ContextNotFound:
    """Return the one answer for absent, deleted and another tenant's."""
    return ContextNotFound(NO_CONTEXT, param="session_id")


def expired() -> ContextExpired:
    """Return the answer for a context whose life has ended and is still remembered."""
    return ContextExpired("the context has expired", param="session_id")


def exists() -> ContextExists:
    """Return the answer to reserving the id of a live context."""
    return ContextExists("a context with this id exists already", param="session_id")


def too_many_contexts(contexts_max: int) -> ContextQuotaExceeded:
    """Return the answer to one context more than the tenant may have; waiting does not help, a delete does."""
    return ContextQuotaExceeded(f"the tenant has reached its limit of {contexts_max} contexts")


def busy(remaining_ms: int) -> ContextBusy:
    """Return the answer while another turn's lease lives for `remaining_ms` more; never asks to retry at once."""
    return ContextBusy("another turn of this context is running", retry_after_s=max(1, -(-remaining_ms // 1000)))


def generation_mismatch(current: int) -> GenerationMismatch:
    """Return the answer to a turn built on another generation than `current`."""
    return GenerationMismatch(f"the context is at generation {current}")


def generation_gone(current: int) -> GenerationGone:
    """Return the answer to going back to what was replaced, is too long ago to be remembered, or is still to come."""
    return GenerationGone(
        f"generation is not part of the context, which is at generation {current}", param="generation"
    )


def already_answered() -> AlreadyAnswered:
    """Return the answer to a request that was committed before: what it was answered is kept."""
    return AlreadyAnswered("a request under this key was answered before", param=_KEY, retry_after_s=1)


def key_reused() -> IdempotencyKeyReused:
    """Return the answer to another request under the same key."""
    return IdempotencyKeyReused("this idempotency key was used for a different request", param=_KEY)


def too_many_bytes(bytes_max: int) -> ContextQuotaExceeded:
    """Return the answer to more bytes of transcripts and kept answers than the tenant may have."""
    return ContextQuotaExceeded(
        f"the tenant's transcripts and stored answers have reached the limit of {bytes_max} bytes "
        "(MANAGER_TENANT_BYTES_MAX): delete contexts, or wait until some expire"
    )


def lease_lost() -> LeaseLost:
    """Return the answer to a caller who does not hold the lease."""
    return LeaseLost("the turn's lease has ended or belongs to another turn")


def keeps_too_much(num_segments: int) -> InvalidRequest:
    """Return the answer to a commit that keeps more segments than there are."""
    return InvalidRequest(f"the transcript has {num_segments} segments", param="keep_segments")


def unknown_after() -> InvalidRequest:
    """Return the answer to a page that should start after a session nobody knows."""
    return InvalidRequest("`after` names no context of this list", param="after")


def damaged() -> ContextCacheError:
    """Return the answer to a row that cannot be read, or a transcript shorter than it says: never continue from it."""
    return ContextCacheError("the stored context is damaged")


def unavailable() -> StoreUnavailable:
    """Return the answer when the store did not answer in time."""
    return StoreUnavailable("no connection to the session store", retry_after_s=1)
