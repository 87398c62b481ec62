"""One real stack for the end-to-end tests: Valkey, manager, sidecar, vLLM with SmolLM2 in float32, gateway, Envoy."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local.ports import PORTS_OF_A_STACK
from deploy.local.readiness import gateway_endpoints
from deploy.local.stack import Stack
from tests.helpers.patience import CONNECTOR, PARTS
from tests.helpers.vllm_answers import wait_until

MODEL = "smollm2-135m-instruct"
KEY, OTHER_KEY = "test-key-1234567890", "test-key-other"
TOMBSTONE_S = 15
both_fronts = pytest.mark.parametrize("front", ["envoy", "http"], indirect=True)
"""For what a front could spoil. The others go through Envoy, as production does."""


class Client:
    """A person with an API key, before one of the fronts."""

    def __init__(self, stack: Stack, key: str = KEY, *, front: str = "envoy") -> None:
        self.stack = stack
        self.front = front
        self.url = {"envoy": stack.url, "http": stack.front_url}[front]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=300)
        self.engine = httpx.Client(base_url=stack.engine_urls[0], timeout=300)

    def close(self) -> None:
        self.http.close()
        self.engine.close()

    def sealed(self, session_id: str) -> bool:
        """Return whether the context's KV is durable."""
        return self.get(session_id)["holder"]["state"] == "sealed"

    def create(self, **body: Any) -> dict[str, Any]:
        return self._ok(self.http.post("/v1/context", json=self._body(body)))

    def complete(self, **body: Any) -> dict[str, Any]:
        return self._ok(self.http.post("/v1/completions", json=self._body(body)))

    def chat(self, **body: Any) -> dict[str, Any]:
        return self._ok(self.http.post("/v1/chat/completions", json=self._body(body)))

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Events of a streamed answer; `[DONE]` must come once and last."""
        with self.http.stream("POST", path, json=self._body(body) | {"stream": True}) as response:
            assert response.status_code == 200
            lines = [line for line in response.iter_lines() if line]
        assert lines.count("data: [DONE]") == 1
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def delete(self, session_id: str) -> None:
        assert self._ok(self.http.delete(f"/v1/context/{session_id}"))["status"] == "success"

    def get(self, session_id: str) -> dict[str, Any]:
        return self._ok(self.http.get(f"/v1/context/{session_id}"))

    def delete_all(self) -> None:
        while contexts := self._ok(self.http.get("/v1/context", params={"limit": 100}))["data"]:
            for context in contexts:
                self.delete(context["session_id"])

    def forget_prefixes(self) -> None:
        """Empty the engine's own prefix cache, so that the next answer is cold or restored."""
        wait_until(lambda: self.engine.post("/reset_prefix_cache").json()["success"], within_s=60)

    def _body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": MODEL, "temperature": 0, "max_tokens": 8} | body

    @staticmethod
    def _ok(response: httpx.Response) -> dict[str, Any]:
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack; parts a test kills it starts again."""
    directory = tmp_path_factory.mktemp("stack")
    running = Stack(
        directory,
        port=free_port_range(),
        dtype="float32",
        dev=True,
        # A prefill of more than one chunk well below 2 500 tokens; TTLs and passes short enough to be waited for.
        engine_args=["--max-num-batched-tokens", "1024"],
        connector=CONNECTOR,
        env={
            **PARTS,
            "MANAGER_MIN_TTL_S": "1",
            "MANAGER_TOMBSTONE_S": str(TOMBSTONE_S),
            "MANAGER_SWEEP_INTERVAL_S": "0.5",
            "SIDECAR_COLLECT_INTERVAL_S": "0.5",
        },
    )
    try:
        running.up()
        yield running
    finally:
        running.clean()


@pytest.fixture
def front(request: pytest.FixtureRequest) -> str:
    """Which front the callers use."""
    return getattr(request, "param", "envoy")


@pytest.fixture
def client(stack: Stack, front: str) -> Iterator[Client]:
    """A caller of tenant `demo`; the stack is whole before and after."""
    stack.up()
    wait_ready(stack)
    caller = Client(stack, front=front)
    yield caller
    caller.close()
    stack.up()


@pytest.fixture
def other(stack: Stack, front: str) -> Iterator[Client]:
    """A caller of tenant `other`."""
    caller = Client(stack, OTHER_KEY, front=front)
    yield caller
    caller.close()


@pytest.fixture
def stored(stack: Stack):
    """Return the bytes of block and tail files on the sidecar's disk."""

    def count() -> int:
        return stored_bytes(stack)

    return count


def stored_bytes(stack: Stack) -> int:
    """Return the bytes of block, tail and manifest files on all sidecars' disks."""
    return sum(
        size_bytes(file)
        for name in stack.names_of("sidecar")
        for kind in ("blocks", "tails", "manifests")
        for file in (stack.paths.sidecar_data(name) / kind).rglob("*")
    )


def size_bytes(file: Path) -> int:
    """Return a file's size; 0 for what is no file, or no more."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def wait_ready(stack: Stack) -> None:
    """Wait until the gateway has seen every engine ready: the last test may have kept one busy, or killed it."""

    def all_ready() -> bool:
        endpoints = gateway_endpoints(stack.front_url)
        return bool(endpoints) and all(endpoint["ready"] for endpoint in endpoints.values())

    wait_until(all_ready, within_s=60)


def free_port_range() -> int:
    """Return a port whose followers are free now; the stack itself checks each again."""
    for port in range(18000, 30000, 100):
        try:
            for offset in range(PORTS_OF_A_STACK):
                with socket.create_server(("127.0.0.1", port + offset)):
                    pass
        except OSError:
            continue
        return port
    raise AssertionError("no free ports")
