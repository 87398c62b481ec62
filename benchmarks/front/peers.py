"""The two peers, from PyPI, in an environment of their own: their requirements are not ours.

vllm-router is the vLLM project's router in Rust (github.com/vllm-project/router, Apache-2.0), litellm the OpenAI
proxy in Python (github.com/BerriAI/litellm, MIT). Each runs as its documentation starts it, one worker,
without a database or log lines: litellm with a master key, which it insists on, the router with `round_robin`, its
cheapest policy, since there is one pod.
Neither knows contexts: what they do is route, and for litellm also read and write anew every answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.front.stub_engine import MODEL
from deploy.local.environments import made
from deploy.local.progress import StepFailed, say

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".build" / "bench-peers"
PINS = {
    "vllm-router": "0.1.17",
    "litellm[proxy]": "1.106.2",
    "opentelemetry-sdk": "1.45.2",
    "opentelemetry-exporter-otlp": "1.45.2",
}
"""What the figures are of. litellm without OpenTelemetry tries to import it again with every request, which triples its
cost; its own container image has it too."""
NEEDED_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Peer:
    """How one peer is started for a pod."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    ready_path: str


def install() -> bool:
    """Make the environment unless it is there; return False, having said why, when that cannot be done."""
    try:
        made(
            ENVIRONMENT.name, [f"{package}=={version}" for package, version in PINS.items()], needed_bytes=NEEDED_BYTES
        )
    except StepFailed as failure:
        say(f"the peers are left out: {failure}")
        return False
    return True


def vllm_router(*, port: int, metrics_port: int, pod_url: str) -> Peer:
    """Return the router in front of one pod."""
    options = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--worker-urls": pod_url,
        "--policy": "round_robin",
        "--prometheus-port": str(metrics_port),
        "--worker-startup-check-interval": "1",
        "--log-level": "error",
    }
    words = [word for pair in options.items() for word in pair]
    return Peer("vllm-router", (_program("vllm-router"), *words), {}, "/health")


def litellm(*, port: int, pod_url: str, key: str, directory: Path) -> Peer:
    """Return the proxy in front of one pod; its configuration is written into `directory`."""
    config = directory / "litellm.yaml"
    upstream = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{pod_url}/v1", "api_key": "none"}
    content = {
        "model_list": [{"model_name": MODEL, "litellm_params": upstream}],
        "litellm_settings": {"num_retries": 0, "request_timeout": 600},
        "general_settings": {"master_key": key, "disable_spend_logs": True},
    }
    config.write_text(json.dumps(content))  # JSON is YAML
    words = ("--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1")
    env = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would ask the internet for prices
        "AIOHTTP_CONNECTOR_LIMIT": "4000",  # its own would end at 500 streams
        "AIOHTTP_CONNECTOR_LIMIT_PER_HOST": "4000",
    }
    return Peer("litellm", (_program("litellm"), *words), env, "/health/liveliness")


def _program(name: str) -> str:
    return str(ENVIRONMENT / "bin" / name)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what would configure our own parts or the peers."""
    prefixes = ("GATEWAY_", "MANAGER_", "LITELLM_", "PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
