"""What stands beside an Envoy that runs from its own image: keeps its keys current, and drains it before it ends.

It is the pod's main container and Envoy a native sidecar, so that Kubernetes ends the attendant first, waits until it
has ended, and ends Envoy then. See ADR 0070.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal

from gateway.envoy.drain import drain
from gateway.envoy.keys import watched_keys
from gateway.envoy.settings import EnvoySettings


async def attend(settings: EnvoySettings, stop: asyncio.Event) -> None:
    """Attend Envoy until `stop` is set, then drain it; another SIGTERM ends the drain.

    Raises OSError, or ValueError when the key file is broken.
    """
    keys = asyncio.create_task(_follow_keys(settings))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({stopped, keys}, return_when=asyncio.FIRST_COMPLETED)
        if keys.done():
            keys.result()
        hurry = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, hurry.set)
        # Keys too are followed to the end.
        await drain(settings, hurry)
    finally:
        for task in (keys, stopped):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _follow_keys(settings: EnvoySettings) -> None:
    if settings.api_keys_file:
        await watched_keys(settings).follow()
    await asyncio.Event().wait()
