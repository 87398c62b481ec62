"""The processes of the front's benchmark and the paths through them: pod, control plane, both Envoys, the peers.

The plain Envoy has the bootstrap of the other without the external processor, so that the difference between the two
is the plugin and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.front import peers
from benchmarks.front.envoy_bootstrap import with_plugin, without_plugin
from benchmarks.front.stub_engine import MODEL
from benchmarks.processes import POD, Processes
from context_manager.client import ContextManagerClient
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit
from deploy.local.ports import LOOPBACK
from deploy.local.progress import StepFailed, say
from deploy.local.readiness import HttpReady

TENANT = "demo"
SESSION_ID = "ctx_" + "0123456789abcdef" * 2
KEY = "sk-" + secrets.token_hex(32)
"""Of this run; litellm wants one that begins so."""
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


class Parts(Processes):
    """What runs, and the ways to it."""

    def __init__(self, directory: Path) -> None:
        """`directory` is empty and gets configuration, secrets and logs."""
        super().__init__(directory)
        self.ways: list[Way] = []

    def start_ours(self) -> None:
        """Start pod, control plane, gateway and both Envoys. Raises StepFailed."""
        self.start_stub()
        self.start_valkey()
        self.start_manager()
        asyncio.run(self._commit_session())
        self.start_gateway({KEY: TENANT})
        addresses = {
            "gateway": self.address("gateway"),
            "ext_proc": self.address("ext_proc"),
            "pod": self.address("stub"),
        }
        shapes: dict[str, Callable[..., dict[str, Any]]] = {"envoy": with_plugin, "envoy-alone": without_plugin}
        for name, shape in shapes.items():
            self.start_envoy(name, partial(shape, **addresses))
        turn_by_head = {"x-session-id": SESSION_ID}
        turn_by_body = {"session_id": SESSION_ID}
        control = ("gateway", "manager", "valkey")
        self.ways += [
            Way("direct", self.port("stub"), ()),
            Way("envoy", self.port("envoy-alone"), ("envoy-alone",), routed=False),
            Way("envoy+plugin", self.port("envoy"), ("envoy", *control)),
            Way("envoy+plugin head", self.port("envoy"), ("envoy", *control), headers=turn_by_head, signed=True),
            Way("envoy+plugin body", self.port("envoy"), ("envoy", *control), body=turn_by_body, signed=True),
            Way("http front", self.port("gateway"), control),
            Way("http front turn", self.port("gateway"), control, body=turn_by_body, signed=True),
        ]

    def start_peers(self) -> None:
        """Start the peers; one that does not start is left out, and why is said."""
        pod_url = self.url("stub")
        ports = {name: self.free_port(name) for name in ("vllm-router", "litellm", "vllm-router metrics")}
        found = [
            peers.vllm_router(port=ports["vllm-router"], metrics_port=ports["vllm-router metrics"], pod_url=pod_url),
            peers.litellm(port=ports["litellm"], pod_url=pod_url, key=KEY, directory=self.directory),
        ]
        for peer in found:
            ready = HttpReady(self.url(peer.name) + peer.ready_path)
            try:
                self.start(peer.name, peer.command, ready, env=peer.env, within_s=120)
            except StepFailed as failure:
                say(f"{peer.name} is left out: {failure}")
                self.end(peer.name)
            else:
                self.ways.append(Way(peer.name, ports[peer.name], (peer.name,)))

    async def _commit_session(self) -> None:
        """Make the one session of all turns: it lies in Valkey, held by the stub pod."""
        manager = ContextManagerClient(self.address("manager"))
        segment = Segment(SegmentKind.PROMPT, (1, 2, 3), text="hello")
        try:
            await manager.reserve(NewSession(TENANT, SESSION_ID, MODEL, ttl_s=7200), lease_id="l", lease_ttl_ms=5000)
            commit = TurnCommit(TENANT, SESSION_ID, "l", 0, 0, (segment,), "ref_" + "a" * 32, POD)
            await manager.register_session_cache(commit)
        finally:
            await manager.close()


@contextmanager
def running_parts(directory: Path, *, with_peers: bool) -> Iterator[Parts]:
    """Run all parts for the length of the `with` block. Raises StepFailed."""
    with Parts(directory) as parts:
        parts.start_ours()
        if with_peers:
            parts.start_peers()
        yield parts
