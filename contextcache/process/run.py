"""Frame of a server process: arguments, settings, stop signals, one event loop."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError

from contextcache.process.logs import set_up_logs
from contextcache.process.settings import ProcessSettings, settings_help

log = logging.getLogger(__name__)

SettingsT = TypeVar("SettingsT", bound=ProcessSettings)


def wants_help(settings: type[ProcessSettings], purpose: str) -> bool:
    """Print `--help` and return True; exit 2 for other arguments; return False without arguments."""
    arguments = sys.argv[1:]
    if not arguments:
        return False
    print(settings_help(settings, purpose))
    if arguments in (["--help"], ["-h"]):
        return True
    sys.exit(2)


def settings_or_exit(settings: type[SettingsT]) -> SettingsT:
    """Read the environment. Exits 2 with one line for each wrong variable, without its value."""
    prefix = settings.model_config.get("env_prefix", "")
    try:
        return settings()
    except ValidationError as exc:
        for error in exc.errors(include_input=False, include_url=False):
            name = "_".join(map(str, error["loc"])).upper()
            print(f"{prefix}{name}: {error['msg']}" if name else error["msg"], file=sys.stderr)
    except SettingsError as exc:
        print(exc, file=sys.stderr)
    sys.exit(2)


def run_part(
    name: str,
    serve: Callable[[asyncio.Event], Awaitable[None]],
    *,
    log_level: str,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Set up logs and run `serve` until a stop signal. Exits 1 with the reason if `serve` cannot start.

    Reasons are OSError and ValueError: a taken port, a missing or broken file.
    """
    set_up_logs(log_level)
    _keep_memory_out_of_core_files()
    _allow_all_descriptors()
    try:
        run_until_signalled(serve, loop_factory=loop_factory)
    except (OSError, ValueError) as exc:
        log.error("%s cannot start", name, extra={"error": str(exc)})  # noqa: TRY400 - the reason, not the stack
        sys.exit(1)


def _keep_memory_out_of_core_files() -> None:
    """Disable core files: they would hold prompts, keys and the signing secret.

    Only the soft limit changes. An operator can raise it for a process (`prlimit --pid <pid> --core=unlimited`).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def _allow_all_descriptors() -> None:
    """Raise the soft limit of descriptors to the hard one: the usual 1 024 suffice for 500 streams, at two each.

    The soft limit protects programs that use `select`. Ours do not; Go's runtime raises it too.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_until_signalled(
    serve: Callable[[asyncio.Event], Awaitable[None]],
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run `serve(stop)` in an event loop. SIGTERM and SIGINT set `stop`; `serve` returns after draining."""

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await serve(stop)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes an event loop: uvloop's if it is installed, else asyncio's, which is slower."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def until_stopped(serving: asyncio.Task[None], stop: asyncio.Event) -> None:
    """Return when `stop` is set or the server has ended."""
    stopping = asyncio.create_task(stop.wait(), name="stop signal")
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
