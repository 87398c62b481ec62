"""`context-cache serve PART` starts a process of a deployment. The package context-cache-server has the processes.

This module needs only the packages of the part: an image starts its part without loading the command line.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

MISUSED = 2
"""Exit code for a part that is not installed."""


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of process."""

    module: str
    extra: str
    """Extra of context-cache-server with its dependencies."""
    purpose: str


PARTS: Mapping[str, Part] = {
    "gateway": Part(
        "gateway", "gateway", "Route requests to vLLM pods. `gateway hash-key` hashes an API key from stdin."
    ),
    "manager": Part("context_manager", "manager", "Keep sessions, transcripts and turns in Redis."),
    "sidecar": Part("kv_sidecar", "sidecar", "Keep KV blocks beside one vLLM pod."),
    "turn": Part("vllm_plugin.turn", "turn", "Run the turns of one vLLM pod."),
    "envoy": Part(
        "gateway.envoy",
        "gateway",
        "Prepare an Envoy (`envoy bootstrap`) and attend it (`envoy attend`).",
    ),
    "injector": Part(
        "pod_injector",
        "injector",
        "Add sidecar, turn process and connector to vLLM pods: a webhook. `injector payload DIR` copies the connector.",
    ),
}
"""All parts by their names on the command line."""


def start(name: str, arguments: list[str]) -> int:
    """Run a part as `python -m` would, and return the exit code. The part may end the process itself."""
    part = PARTS[name]
    cure = f"install context-cache-server[{part.extra}]"
    if find_spec(part.module.partition(".")[0]) is None:
        print(f"`context-cache serve {name}` is in another package: {cure}", file=sys.stderr)
        return MISUSED
    sys.argv = [f"context-cache serve {name}", *arguments]
    try:
        runpy.run_module(part.module, run_name="__main__", alter_sys=False)
    except ModuleNotFoundError as exc:
        print(f"`context-cache serve {name}` needs the module {exc.name}: {cure}", file=sys.stderr)
        return MISUSED
    return 0
