"""The path of a request through the product: functions in order, their files, and the returns to each file.

`python -P tests/kit/walk.py` prints three walks: a create, a turn and a PATCH. `PYTHONPATH` chooses the tree: that of
another commit works too. The HTTP front runs in this process, before a manager behind gRPC and a pod that is a stub.

A walk lists each function that is entered, a coroutine once. It counts product code without generated stubs,
comprehensions, lambdas and dataclass constructors. A create and a turn end when the signed request leaves for its pod.
A *stay* is a run of functions of one file. A file with N stays has N - 1 returns.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType

from prometheus_client import CollectorRegistry

import gateway
from gateway.app import gateway_app
from tests.kit.gateway_parts import KEY
from tests.kit.gateway_server import RunningManager, settings_for
from tests.kit.stub_engine import StubEngine

PRODUCT = Path(gateway.__file__).parents[1]
PACKAGES = ("gateway", "contextcache", "context_manager")
GENERATED = ("contextcache/v1/", "contextcache/extproc/")
CREATE = "POST /v1/context"
TURN = "a turn: POST /v1/completions with session_id"
PATCH = "PATCH /v1/context/{id}"
REQUESTS = {
    CREATE: ("POST", "/v1/context", {"model": "stub-model", "prompt": "Once upon a time"}),
    TURN: ("POST", "/v1/completions", {"session_id": "ctx_walk", "prompt": "and then"}),
    PATCH: ("PATCH", "/v1/context/ctx_walk", {"ttl": 900, "ttl_policy": "sliding", "metadata": {"a": "b"}}),
}
SENT = "gateway/http/carrier.py"
"""A walk ends where the carrier takes the signed request."""

_walking: ContextVar[bool] = ContextVar("walking", default=False)
"""Set in the task of the request, and so in each task that it starts."""


@dataclass
class Walk:
    """Functions in the order in which a request enters them."""

    steps: list[tuple[str, str]] = field(default_factory=list)
    """File and qualified name."""
    _seen: set[FrameType] = field(default_factory=set)
    _has_ended: bool = False

    def entered(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note a call; the signature is that of `sys.setprofile`."""
        if event != "call" or self._has_ended or not _walking.get() or frame in self._seen:
            return
        self._seen.add(frame)
        code = frame.f_code
        file = Path(code.co_filename)
        if not file.is_relative_to(PRODUCT):
            return
        name = file.relative_to(PRODUCT).as_posix()
        if not name.startswith(PACKAGES) or name.startswith(GENERATED) or code.co_name.startswith("<"):
            return
        self._has_ended = name == SENT
        if not self._has_ended:
            self.steps.append((name, code.co_qualname))

    @property
    def stays(self) -> Counter[str]:
        """Runs of functions of one file, by file."""
        return Counter(file for file, _ in groupby(self.steps, key=lambda step: step[0]))

    def returns_to(self, file: str) -> int:
        return max(0, self.stays[file] - 1)

    def __str__(self) -> str:
        lines = [
            f"{file:36} {', '.join(name for _, name in stay)}"
            for file, stay in groupby(self.steps, lambda step: step[0])
        ]
        returns = {file: count - 1 for file, count in self.stays.most_common() if count > 1}
        told = ", ".join(f"{file} {count}" for file, count in returns.items())
        head = f"{len(self.steps)} functions, {len(self.stays)} files, {sum(returns.values())} returns"
        return "\n".join([*lines, f"{head}: {told}"])


async def walks(directory: Path) -> dict[str, Walk]:
    """Return the walks by name; `directory` is empty."""
    manager, engine = RunningManager(), StubEngine()
    await manager.start()
    await engine.start()
    try:
        await manager.add("ctx_walk")
        settings = settings_for(directory, {"pod-a": engine}, manager_port=manager.port)
        async with gateway_app(settings, registry=CollectorRegistry()) as app:
            front = getattr(app, "front", app)  # before the fronts shared their parts: an object with both
            await (front.gateway.parts if front is app else app).endpoints.looked.wait()
            for request in REQUESTS.values():  # fills caches, and opens connections
                await _walk(front, *request)
            return {name: await _walk(front, *request) for name, request in REQUESTS.items()}
    finally:
        await engine.stop()
        await manager.stop()


async def _walk(front, method: str, path: str, body: dict) -> Walk:
    async def asked() -> None:
        _walking.set(True)
        sys.setprofile(walk.entered)
        try:
            await front(_scope(method, path), received.get, sent)
        finally:
            sys.setprofile(None)

    walk, statuses = Walk(), []
    received: asyncio.Queue = asyncio.Queue()
    received.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})

    async def sent(message: dict) -> None:
        statuses.append(message.get("status"))

    await asyncio.create_task(asked())
    assert statuses[0] == 200, f"{method} {path} was answered {statuses[0]}"
    return walk


def _scope(method: str, path: str) -> dict:
    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"content-type", b"application/json")]
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
    }


def main() -> None:
    """Print the walks."""
    with tempfile.TemporaryDirectory(prefix="walk-") as directory:
        for name, walk in asyncio.run(walks(Path(directory))).items():
            print(f"# {name}\n{walk}\n")


if __name__ == "__main__":
    main()
