"""Ends an Envoy gently: on SIGTERM it would cut what is running, so before that its admin interface is asked.

1. `/healthcheck/fail`: `/ready` is 503, and every answer closes its connection.
2. `drain_delay_s` later the port of clients is closed; then until no request is active, at most `drain_timeout_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import aiohttp

from gateway.envoy.settings import EnvoySettings

log = logging.getLogger(__name__)

_ADMIN_TIMEOUT_S = 5.0
_POLL_S = 0.1


async def drain(settings: EnvoySettings, hurry: asyncio.Event) -> None:
    """Return when nothing runs any more, at the bounds, or soon after `hurry` is set."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    try:
        async with _Admin(settings.admin_address) as admin:
            await admin.fail_health_check()
            log.info("envoy draining", extra={"active_requests": await admin.num_active()})
            closed_s = started_s + settings.drain_delay_s
            await _wait(hurry, closed_s - loop.time())
            await admin.close_port()
            bound_s = closed_s + settings.drain_timeout_s
            while (left_s := bound_s - loop.time()) > 0 and not hurry.is_set() and await admin.num_active():
                await _wait(hurry, min(left_s, _POLL_S))
    except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
        # Not started yet, gone, or too ill to answer: nothing to wait for.
        log.warning("envoy drain failed", extra={"error": str(exc)})


async def _wait(event: asyncio.Event, within_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), max(0.0, within_s))


class _Admin:
    """Envoy's admin interface."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}"

    async def __aenter__(self) -> _Admin:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ADMIN_TIMEOUT_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def fail_health_check(self) -> None:
        await self._ask("POST", "/healthcheck/fail")

    async def close_port(self) -> None:
        """Close the port of clients; the listener of probes and metrics stays."""
        await self._ask("POST", "/drain_listeners?inboundonly")

    async def num_active(self) -> int:
        """Return how many requests of clients run."""
        text = await self._ask("GET", "/stats?filter=^http.front.downstream_rq_active$")
        return int(text.rpartition(":")[2])

    async def _ask(self, method: str, path: str) -> str:
        async with self._http.request(method, self._url + path, raise_for_status=True) as answer:
            return await answer.text()
