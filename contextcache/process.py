"""What every server process does around its work: arguments, stop signals, one event loop."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable

from contextcache.settings import ProcessSettings, settings_help


def wants_help(settings: type[ProcessSettings], purpose: str) -> bool:
    """Print `--help` when asked for, refuse any other argument (exit 2), else return False."""
    arguments = sys.argv[1:]
    if not arguments:
        return False
    print(settings_help(settings, purpose))
    if arguments in (["--help"], ["-h"]):
        return True
    sys.exit(2)


def run_until_signalled(
    serve: Callable[[asyncio.Event], Awaitable[None]],
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run `serve(stop)` in an event loop; SIGTERM and SIGINT set `stop`, and `serve` returns after draining."""

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await serve(stop)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
