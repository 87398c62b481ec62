"""Contexts that are named by a label: an `X-Session-ID` that does not begin with `ctx_` (ADR 0094).

Agents send such labels with plain requests too, so a look-up must cost them little. It waits half a second at most.
After a look-up that the store did not answer, labels name nothing for a second, and requests pass as plain ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from contextcache.claim import Claims, label_of
from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, ContextExpired, ContextNotFound, StoreUnavailable
from contextcache.model import SessionId, TenantId
from contextcache.responses import Continued, continued_by

log = logging.getLogger(__name__)

LOOK_UP_S: Final = 0.5
"""Longest wait of a plain request for its label: a look-up takes a millisecond or two, more on a busy machine."""
PAUSE_MS: Final = 1_000
"""Time without look-ups after one that the store did not answer: longer, and more turns would run without their
context."""


class Labels:
    """Finds the context that a request continues, by its messages and its label."""

    def __init__(self, locate: Callable[[TenantId, SessionId], Awaitable[object]], clock: Clock) -> None:
        """`locate` raises ContextNotFound or ContextExpired where there is no such context."""
        self._locate = locate
        self._clock = clock
        self._paused_until_ms = 0

    async def continued_by(
        self, tenant: TenantId, path: str, claims: Claims | None, header: str | None
    ) -> Continued | None:
        """Return as `responses.continued_by`; a label that equals a context of the tenant's names that context.

        An expired context is named too, so that the client gets its 410. Never fails because of the look-up.
        """
        asked = continued_by(path, claims, header)
        label = label_of(header)
        if claims is None or label is None or (asked is not None and asked.session_id is not None):
            return asked
        return continued_by(path, claims, header, label=label) if await self._is_context(tenant, label) else asked

    async def _is_context(self, tenant: TenantId, label: SessionId) -> bool:
        if 0 < self._paused_until_ms - self._clock.now_ms() <= PAUSE_MS:
            return False
        try:
            async with asyncio.timeout(LOOK_UP_S):
                await self._locate(tenant, label)
        except ContextNotFound:
            return False
        except ContextExpired:
            return True
        except (StoreUnavailable, TimeoutError):
            self._paused_until_ms = self._clock.now_ms() + PAUSE_MS
            log.warning("label look-ups paused for a second: no answer from the context manager")
            return False
        except ContextCacheError as exc:  # of this context: others are looked up
            log.warning("label look-up failed", extra={"code": exc.code})
            return False
        return True
