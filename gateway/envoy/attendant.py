"""Process beside an Envoy that runs from its own image: keeps its keys current, and drains it before it ends.

It is the pod's main container and Envoy a native sidecar. Kubernetes therefore ends the attendant first, waits for its
end, and then ends Envoy (ADR 0070). On SIGTERM Envoy would cut running requests, so the attendant drains it through the
admin interface:

1. `/healthcheck/fail`: `/ready` answers 503, and every answer closes its connection.
2. After `drain_delay_s`: Envoy closes the port of clients.
3. The attendant waits until no request is active, at most `drain_timeout_s`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import suppress

import aiohttp

from gateway.envoy.keys import watched_keys
from gateway.envoy.settings import EnvoySettings

log = logging.getLogger(__name__)

_ADMIN_TIMEOUT_S = 5.0
_POLL_S = 0.1
_ACTIVE_REQUESTS = "/stats?filter=^http.front.downstream_rq_active$"
"""Statistic of the client listener, whose `stat_prefix` is `front`."""


async def attend(settings: EnvoySettings, stop: asyncio.Event) -> None:
    """Attend Envoy until `stop` is set, then drain it; another SIGTERM ends the drain.

    Raises OSError, or ValueError if the key file is broken.
    """
    keys = asyncio.create_task(_follow_keys(settings))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({stopped, keys}, return_when=asyncio.FIRST_COMPLETED)
        if keys.done():
            keys.result()
        hurry = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, hurry.set)
        # Keys stay current during the drain.
        await _drain(settings, hurry)
    finally:
        for task in (keys, stopped):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _follow_keys(settings: EnvoySettings) -> None:
    if settings.api_keys_file:
        await watched_keys(settings).follow()
    await asyncio.Event().wait()


async def _drain(settings: EnvoySettings, hurry: asyncio.Event) -> None:
    """Return when no request is active, at the time limits, or soon after `hurry` is set."""
    time_s = asyncio.get_running_loop().time
    closed_s = time_s() + settings.drain_delay_s
    timeout = aiohttp.ClientTimeout(total=_ADMIN_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(f"http://{settings.admin_address}", timeout=timeout) as admin:
            await _ask(admin, "POST", "/healthcheck/fail")
            log.info("envoy draining", extra={"active_requests": await _num_active(admin)})
            await _wait(hurry, closed_s - time_s())
            # The listener of probes and metrics stays open.
            await _ask(admin, "POST", "/drain_listeners?inboundonly")
            ends_s = closed_s + settings.drain_timeout_s
            while (left_s := ends_s - time_s()) > 0 and not hurry.is_set() and await _num_active(admin):
                await _wait(hurry, min(left_s, _POLL_S))
    except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
        # Envoy has not started, has ended or does not answer: no request can be waited for.
        log.warning("envoy drain failed", extra={"error": str(exc)})


async def _wait(event: asyncio.Event, within_s: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), max(0.0, within_s))


async def _num_active(admin: aiohttp.ClientSession) -> int:
    """Return the number of running requests of clients."""
    return int((await _ask(admin, "GET", _ACTIVE_REQUESTS)).rpartition(":")[2])


async def _ask(admin: aiohttp.ClientSession, method: str, path: str) -> str:
    async with admin.request(method, path, raise_for_status=True) as answer:
        return await answer.text()
