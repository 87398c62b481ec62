"""`context-cache injector`: the webhook. `context-cache injector payload DIR`: copies the connector for such pods."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from contextcache.process.run import run_part, settings_or_exit, wants_help
from pod_injector.payload import copy_payload
from pod_injector.server import serve
from pod_injector.settings import InjectorSettings

PURPOSE = (
    "injector: the mutating webhook that adds the kv-sidecar and the plugin to vLLM pods with its "
    "label.\n`injector payload DIR` copies the connector into DIR, in an init container of such a pod."
)


def main() -> None:
    """Run as a program: exit 2 for wrong settings, 1 if a port or a file is unusable."""
    if sys.argv[1:2] == ["payload"]:
        _payload(sys.argv[2:])
        return
    if wants_help(InjectorSettings, PURPOSE):
        return
    settings = settings_or_exit(InjectorSettings)
    run_part("injector", lambda stop: serve(settings, stop), log_level=settings.log_level)


def _payload(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="context-cache injector payload")
    parser.add_argument("directory", type=Path, help="Directory to copy the plugin into.")
    parsed = parser.parse_args(arguments)
    try:
        copy_payload(parsed.directory)
    except OSError as exc:
        print(f"the plugin was not copied: {exc}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
