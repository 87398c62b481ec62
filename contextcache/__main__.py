"""`context-cache PART`: one command for every process of ours, as the image and the chart start them.

Each part is the module it always was (`context-cache gateway` is `python -m gateway`); only the one asked for is
loaded, so that a part needs no other part's dependencies.
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
    "injector": ("injector", "the webhook that adds sidecar and plugin to vLLM pods; `injector payload DIR`"),
    "doctor": ("doctor", "checks a running deployment and says what is wrong"),
}
"""Module and purpose of each part."""


def main() -> None:
    """Run the part that the first argument names; exit 2 when there is none of this name."""
    arguments = sys.argv[1:]
    if arguments in (["--help"], ["-h"]):
        print(usage())
        return
    if not arguments or arguments[0] not in PARTS:
        print(usage(), file=sys.stderr)
        sys.exit(2)
    part = arguments[0]
    sys.argv = [f"context-cache {part}", *arguments[1:]]
    runpy.run_module(PARTS[part][0], run_name="__main__", alter_sys=False)


def usage() -> str:
    """Return what `--help` prints."""
    lines = ["usage: context-cache PART [argument ...]", "", "Parts (each has --help):"]
    return "\n".join(lines + [f"  {name:<10}{purpose}" for name, (_, purpose) in PARTS.items()])


if __name__ == "__main__":
    main()
