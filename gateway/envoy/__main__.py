"""`python -m gateway.envoy bootstrap | attend`: write Envoy's files; keep its keys current and drain it."""

from __future__ import annotations

import sys
from functools import partial

from contextcache.process.logs import set_up_logs
from contextcache.process.run import run_part, settings_or_exit
from contextcache.process.settings import settings_help
from gateway.envoy.attendant import attend
from gateway.envoy.render import write_folder
from gateway.envoy.settings import EnvoySettings

_USAGE = """usage: context-cache serve envoy bootstrap   write bootstrap, SDS files and keys to ENVOY_CONFIG_DIR
       context-cache serve envoy attend      update Envoy's keys; on SIGTERM drain Envoy"""


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    if arguments in (["--help"], ["-h"]):
        print(settings_help(EnvoySettings, _USAGE))
        return 0
    if arguments not in (["bootstrap"], ["attend"]):
        print(_USAGE, file=sys.stderr)
        return 2
    settings = settings_or_exit(EnvoySettings)
    if arguments == ["attend"]:
        run_part("envoy attendant", partial(attend, settings), log_level=settings.log_level)
        return 0
    set_up_logs(settings.log_level)
    try:
        write_folder(settings)
    except (OSError, ValueError) as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
