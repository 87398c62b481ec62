"""How vLLM and its turn process are started: vLLM's command line, plain or with our connector, and environments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.local.model import CACHE_DIR, MODEL_NAME
from deploy.local.pods import endpoint_name
from deploy.local.ports import LOOPBACK
from deploy.local.settings import StackSettings

PLAIN_ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": LOOPBACK,
    "VLLM_CACHE_ROOT": str(CACHE_DIR),
}
"""Of every engine, ours or not: nothing leaves the machine."""


def engine_command(settings: StackSettings, number: int, *, sidecar: str) -> tuple[str, ...]:
    """Return the command line of an engine, counted from 0; `sidecar` is where its connector finds its own."""
    transfer = {
        "kv_connector": "ContextCacheConnector",
        "kv_connector_module_path": "vllm_plugin.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "sidecar": sidecar,
            "secret_file": str(settings.paths.secret),
            **settings.connector,
        },
    }
    plugin = ("--kv-transfer-config", json.dumps(transfer))
    port = settings.ports.engine(number)
    return (*plain_command(settings.model_dir, port=port, dtype=settings.dtype), *plugin, *settings.engine_args)


def plain_command(model_dir: Path, *, port: int, dtype: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command line of an engine without anything of ours, which is otherwise as ours are."""
    options = {
        "--model": str(model_dir),
        "--served-model-name": MODEL_NAME,
        "--host": LOOPBACK,
        "--port": str(port),
        "--dtype": dtype,
        "--max-model-len": "8192",
        "--block-size": "32",
    }
    pairs = (word for pair in options.items() for word in pair)
    flags = ("--enforce-eager", "--enable-prompt-tokens-details")
    return (python, "-m", "vllm.entrypoints.openai.api_server", *pairs, *flags)


def engine_environment(settings: StackSettings) -> dict[str, str]:
    """Return the environment of an engine."""
    own = {**PLAIN_ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1" if settings.dev else "0"}
    return settings.environment(own, defaults=engine_defaults(settings.engines))


def turn_environment(settings: StackSettings, number: int, *, sidecar: str) -> dict[str, str]:
    """Return the environment of an engine's turn process; `sidecar` is where it finds its own."""
    return settings.environment(
        {
            "TURN_MANAGER": f"{LOOPBACK}:{settings.ports.manager}",
            "TURN_SIDECAR": sidecar,
            "TURN_SECRET_FILE": str(settings.paths.secret),
            "TURN_ENDPOINT_NAME": endpoint_name(number),
            "TURN_ENGINE_URL": f"http://{LOOPBACK}:{settings.ports.engine(number)}",
            "TURN_LISTEN_HOST": LOOPBACK,
            "TURN_LISTEN_PORT": str(settings.ports.turn(number)),
        }
    )


def engine_defaults(engines: int = 1) -> Mapping[str, str]:
    """Return what an engine on the CPU takes of this machine, as one of so many; the caller's environment wins."""
    threads = max(1, min(len(os.sched_getaffinity(0)), 8) // engines)
    return {
        # GiB: 2 hold 93 000 tokens of SmolLM2 in bfloat16.
        "VLLM_CPU_KVCACHE_SPACE": "2" if engines == 1 else "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding needs rights that containers lack
        "OMP_NUM_THREADS": str(threads),
    }
