"""`context-cache`: the command line for contexts, `serve` for every process of ours, and the doctor.

Each part is the module it always was (`context-cache serve gateway` is `python -m gateway`); only what is asked for is
loaded, so that a part needs no other part's dependencies and the command line needs none of them.
"""

from __future__ import annotations

import runpy
import sys

PARTS = {
    "gateway": ("gateway", "routes requests to vLLM pods; `gateway hash-key` hashes an API key from stdin"),
    "manager": ("context_manager", "sessions, transcripts and turns, in Redis"),
    "sidecar": ("kv_sidecar", "KV blocks beside one vLLM pod"),
    "envoy": (
        "gateway.envoy",
        "beside an Envoy in front: `envoy bootstrap` before it starts, `envoy attend` until it ends",
    ),
    "injector": ("pod_injector", "the webhook that adds sidecar and plugin to vLLM pods; `injector payload DIR`"),
}
"""Module and purpose of each part."""


def main() -> None:
    """Run what the first argument names."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"]:
        _serve(arguments[1:])
    elif arguments[:1] == ["doctor"]:
        _start("doctor", "contextcache.doctor", arguments[1:])
    elif arguments and arguments[0] in PARTS:
        print(f"note: `context-cache {arguments[0]}` is `context-cache serve {arguments[0]}` now", file=sys.stderr)
        _start(arguments[0], PARTS[arguments[0]][0], arguments[1:])
    else:
        from contextcache.cli.app import run

        sys.exit(run(arguments))


def usage() -> str:
    """Return what `serve --help` prints."""
    lines = ["usage: context-cache serve PART [argument ...]", "", "Parts (each has --help):"]
    return "\n".join(lines + [f"  {name:<10}{purpose}" for name, (_, purpose) in PARTS.items()])


def _serve(arguments: list[str]) -> None:
    if arguments in (["--help"], ["-h"]):
        print(usage())
        return
    if not arguments or arguments[0] not in PARTS:
        print(usage(), file=sys.stderr)
        sys.exit(2)
    _start(arguments[0], PARTS[arguments[0]][0], arguments[1:])


def _start(name: str, module: str, arguments: list[str]) -> None:
    sys.argv = [f"context-cache {name}", *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
