"""LMCache as a deployment runs it, with our plugin and nothing of our connector and sidecar: all real, on a CPU.

LMCache's coordinator and server, vLLM with LMCache's own connector on a tiny model, our turn process before it, Valkey,
manager and gateway. vLLM and LMCache come into an environment of their own (deploy/local/environments.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from deploy.local.environments import LMCACHE, LMCACHE_BYTES, LMCACHE_NAME, made
from deploy.local.model import CACHE_DIR
from deploy.local.processes import ProcessName, kill_session, name_of, start_process, stop_session
from tests.kit.ports import free_port
from tests.kit.tiny_model import make_tiny_model
from tests.kit.until import wait_until
from tests.kit.valkey import ValkeyServer

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
MODEL = "tiny"
CHUNK_TOKENS = 256
MAX_MODEL_LEN = 2048
SECRET = b"a secret for tests, 32 bytes or more"
_READY_S = 240.0
_GRACE_S = 15.0
_QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}


class LMCacheWorld:
    """A context manager; its parts are `coordinator`, `lmcache`, `manager`, `turn`, `engine` and `gateway`."""

    def __init__(self, directory: Path, *, l2: Mapping[str, Any] | None = None) -> None:
        """`l2`: LMCache's second tier, a directory by default."""
        self.directory = directory
        self.model = str(make_tiny_model(directory / "model", max_model_len=MAX_MODEL_LEN))
        self.environment = made(LMCACHE_NAME, LMCACHE, needed_bytes=LMCACHE_BYTES)
        (directory / "secret").write_bytes(SECRET)
        (directory / "l2").mkdir()
        self._l2 = l2 or {"type": "fs", "base_path": str(directory / "l2")}
        names = ("coordinator", "lmcache", "zmq", "prometheus", "manager", "turn", "engine", "sidecar", "gateway")
        self.ports = {name: free_port() for name in (*names, "metrics", "gateway metrics")}
        self.valkey = ValkeyServer(directory)
        self._running: dict[str, tuple[ProcessName, subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> Self:
        try:
            self.valkey.start()
            for part in ("coordinator", "lmcache", "manager", "turn", "engine", "gateway"):
                self.start(part)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def url(self, part: str) -> str:
        return f"http://{HOST}:{self.ports[part]}"

    def start(self, part: str) -> None:
        """Start it, or start it again, and wait until it serves."""
        command, env = getattr(self, f"_{part}")()
        whole = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **_QUIET, **env}
        log = self.directory / f"{part}.log"
        child = start_process(command, env=whole, cwd=self.directory, log=log)
        self._running[part] = name_of(child.pid), child
        path = {"coordinator": "/instances", "lmcache": "/healthcheck", "turn": "/healthz", "engine": "/health"}
        path["gateway"] = "/readyz"

        def serves() -> bool:
            assert child.poll() is None, f"{part} ended:\n{log.read_text()[-4000:]}"
            return part not in path or _answers(self.url(part) + path[part])

        wait_until(serves, what=f"{part} serves; it writes to {log}", deadline_s=_READY_S, interval_s=0.2)
        if part == "coordinator" and "lmcache" in self._running:
            wait_until(self._is_registered, what="the server has come back to its coordinator", interval_s=0.2)
        if part == "engine" and "gateway" in self._running:
            wait_until(lambda: _answers(f"{self.url('gateway')}/readyz"), what="the gateway has seen it")

    def stop(self, part: str) -> None:
        """End it in order."""
        leader, child = self._running.pop(part)
        stop_session(leader, grace_s=_GRACE_S, child=child)

    def kill(self, part: str) -> None:
        """End it, and all that it forked, without a word."""
        leader, child = self._running.pop(part)
        kill_session(leader, child=child)

    def log(self, part: str) -> str:
        return (self.directory / f"{part}.log").read_text()

    def forget_prefixes(self) -> None:
        """Empty the engine's own prefix cache."""

        def emptied() -> bool:
            answer = httpx.post(f"{self.url('engine')}/reset_prefix_cache", timeout=60)
            return bool(answer.raise_for_status().json()["success"])

        wait_until(emptied, what="the engine has forgotten")

    def _is_registered(self) -> bool:
        return bool(httpx.get(f"{self.url('coordinator')}/instances", timeout=5).json()["instances"])

    def close(self) -> None:
        for part in reversed(list(self._running)):
            self.stop(part)
        self.valkey.kill()
        for file in Path("/dev/shm").glob("lmcache_kv_*"):
            owner = file.name.removeprefix("lmcache_kv_").partition("_")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                file.unlink(missing_ok=True)

    def _coordinator(self) -> tuple[Sequence[str], dict[str, str]]:
        options = {"--host": HOST, "--port": self.ports["coordinator"], "--chunk-size": CHUNK_TOKENS}
        return (str(self.environment / "bin" / "lmcache"), "coordinator", *_words(options)), {}

    def _lmcache(self) -> tuple[Sequence[str], dict[str, str]]:
        options = {
            "--instance-id": "node-0",
            "--host": HOST,
            "--port": self.ports["zmq"],
            "--http-port": self.ports["lmcache"],
            "--prometheus-port": self.ports["prometheus"],
            "--chunk-size": CHUNK_TOKENS,
            "--l1-size-gb": 1,
            "--l1-init-size-gb": 1,
            "--eviction-policy": "LRU",
            "--supported-transfer-mode": "auto",
            "--l2-adapter": json.dumps(self._l2),
            "--coordinator-url": self.url("coordinator"),
            "--coordinator-advertise-ip": HOST,
            "--coordinator-heartbeat-interval": 1,
            "--coordinator-event-flush-interval": 0.2,
        }
        command = (str(self.environment / "bin" / "lmcache"), "server", *_words(options))
        return (*command, "--coordinator-event-reporting"), {}

    def _manager(self) -> tuple[Sequence[str], dict[str, str]]:
        env = {
            "MANAGER_LISTEN": f"{HOST}:{self.ports['manager']}",
            "MANAGER_METRICS_PORT": str(self.ports["metrics"]),
            "MANAGER_REDIS_URL": self.valkey.url,
            "MANAGER_MIN_TTL_S": "1",
        }
        return (sys.executable, "-m", "context_manager"), env

    def _engine(self) -> tuple[Sequence[str], dict[str, str]]:
        extra = {
            "lmcache.mp.host": f"tcp://{HOST}",
            "lmcache.mp.port": self.ports["zmq"],
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        }
        transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        options = {
            "--model": self.model,
            "--served-model-name": MODEL,
            "--host": HOST,
            "--port": self.ports["engine"],
            "--dtype": "float32",
            "--max-model-len": MAX_MODEL_LEN,
            "--block-size": 32,
            "--kv-transfer-config": json.dumps(transfer),
        }
        flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
        python = str(self.environment / "bin" / "python")
        env = {
            "VLLM_CACHE_ROOT": str(CACHE_DIR),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": HOST,
        }
        return (python, "-m", "vllm.entrypoints.openai.api_server", *_words(options), *flags), env

    def _turn(self) -> tuple[Sequence[str], dict[str, str]]:
        env = {
            "TURN_ENGINE_URL": self.url("engine"),
            "TURN_LISTEN_PORT": str(self.ports["turn"]),
            "TURN_SECRET_FILE": str(self.directory / "secret"),
            "TURN_MANAGER": f"{HOST}:{self.ports['manager']}",
            "TURN_ENDPOINT_NAME": "pod-0",
            "TURN_RPC_DEADLINE_MS": "20000",
            "TURN_LMCACHE_URL": self.url("lmcache"),
            "TURN_LMCACHE_COORDINATOR_URL": self.url("coordinator"),
            "TURN_LMCACHE_MODEL": self.model,
            "TURN_LMCACHE_LISTEN": f"{HOST}:{self.ports['sidecar']}",
        }
        return (sys.executable, "-m", "vllm_plugin.turn"), env

    def _gateway(self) -> tuple[Sequence[str], dict[str, str]]:
        pod = {"name": "pod-0", "url": self.url("engine"), "turn_url": self.url("turn")}
        pod["sidecar"] = f"{HOST}:{self.ports['sidecar']}"
        env = {
            "GATEWAY_HOST": HOST,
            "GATEWAY_PORT": str(self.ports["gateway"]),
            "GATEWAY_METRICS_PORT": str(self.ports["gateway metrics"]),
            "GATEWAY_MANAGER": f"{HOST}:{self.ports['manager']}",
            "GATEWAY_ENDPOINTS": json.dumps([pod]),
            "GATEWAY_SECRET_FILE": str(self.directory / "secret"),
            "GATEWAY_PROBE_INTERVAL_S": "0.2",
            "GATEWAY_DELETE_TIMEOUT_S": "30",
        }
        return (sys.executable, "-m", "gateway"), env


def _words(options: Mapping[str, object]) -> list[str]:
    return [str(word) for pair in options.items() for word in pair]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
