"""What every server process does around its work: arguments, settings, stop signals, one event loop."""

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
    """Print `--help` when asked for, refuse any other argument (exit 2), else return False."""
    arguments = sys.argv[1:]
    if not arguments:
        return False
    print(settings_help(settings, purpose))
    if arguments in (["--help"], ["-h"]):
        return True
    sys.exit(2)


def settings_or_exit(settings: type[SettingsT]) -> SettingsT:
    """Read the environment; exit 2 with a line for each wrong variable, which does not repeat what it holds."""
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
    """Set up logs and run `serve` until it is signalled; exit 1, with the reason, when it cannot start.

    OSError and ValueError are such reasons: a port that is taken, a file that is missing or broken.
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
    """Have no core file written: it would hold prompts, keys and the signing secret.

    The soft limit only: who needs one raises it for the process (`prlimit --pid <pid> --core=unlimited`).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def _allow_all_descriptors() -> None:
    """Raise the soft limit to the hard one: the usual 1 024 are used up by some 500 streams, which need two each.

    The soft limit is there for programs that use `select`, as nothing here does; Go's runtime raises it too.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
