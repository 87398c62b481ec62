"""How many of the gateway's functions and files a request passes, on its way to the pod and on the answer's way back.

One `POST /v1/context` and one turn with `X-Session-ID`, through the HTTP front, and both as Envoy asks about them. The
gateway is whole, in this process, over a real manager and a stub pod; the interpreter tells which functions begin
(`sys.setprofile`). A function counts once, however often it runs. `calls` are all that the interpreter makes, of Python
and of C, libraries, client, manager and pod included: a figure that a busy machine changes little.
`--json` prints the trace too.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

import gateway
from context_manager.manager import ContextCacheManager
from context_manager.memory_store import MemorySessionStore
from context_manager.metrics import ManagerMetrics
from context_manager.server import manager_server
from contextcache.clock import SystemClock
from contextcache.extproc.v3 import external_processor_pb2 as pb
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit
from gateway.__main__ import Ports, serve
from gateway.envoy.server import SERVICE_NAME
from gateway.settings import EndpointSettings, GatewaySettings

PACKAGE = Path(gateway.__file__).parent
SESSION_ID = "ctx_" + "0123456789abcdef" * 2
KEY = "a-key"
CREATE = ("/v1/context", {}, {"model": "stub-model", "prompt": "Once upon a time"})
TURN = ("/v1/completions", {"x-session-id": SESSION_ID}, {"model": "stub-model", "prompt": " there was"})
_DEADLINE_S = 120.0
_ROUNDS = 8
"""What not every round passes is made once for a process, or runs beside the request."""
_AFTER_S = 0.02
"""For what the gateway still does once its answer is out."""
_SELDOM_S = 3600.0
"""Between two probes: none runs while a request is traced."""


@dataclass
class Trace:
    """What one request passed."""

    places: list[str]
    """Functions of the gateway by file, in the order in which they first began."""
    calls: int


async def main() -> int:
    """Trace, and print what was passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print each trace, in order, as JSON")
    as_json = parser.parse_args().json
    with tempfile.TemporaryDirectory() as directory:
        traces = await _traces(Path(directory))
    if as_json:
        print(json.dumps({name: asdict(trace) for name, trace in traces.items()}, indent=1))
        return 0
    print(f"{'request':<16} {'functions':>9} {'files':>6} {'calls':>6}")
    for name, trace in traces.items():
        files = {place.partition(":")[0] for place in trace.places}
        print(f"{name:<16} {len(trace.places):>9} {len(files):>6} {trace.calls:>6}")
    return 0


async def _traces(directory: Path) -> dict[str, Trace]:
    pod = await asyncio.start_server(_answer_as_pod, "127.0.0.1", 0)
    counted = ManagerMetrics(CollectorRegistry())
    manager = ContextCacheManager(MemorySessionStore(), clock=SystemClock(), metrics=counted)
    await _commit_session(manager)
    server = manager_server(manager, listen="127.0.0.1:0", max_concurrent_rpcs=10)
    await server.start()
    settings = _settings(directory, pod_port=pod.sockets[0].getsockname()[1], manager_port=server.ports[0])
    stop = asyncio.Event()
    started: asyncio.Future[Ports] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(settings, stop, on_started=started.set_result))
    try:
        async with asyncio.timeout(_DEADLINE_S):
            ports = await started
            found: dict[str, list[Trace]] = {}
            for _ in range(_ROUNDS):
                for name, call in (("create", CREATE), ("turn", TURN)):
                    found.setdefault(f"http {name}", []).append(await _over_http(ports.http, *call))
                    found.setdefault(f"envoy {name}", []).append(await _over_ext_proc(ports.ext_proc, *call))
            return {name: _of_all(rounds) for name, rounds in found.items()}
    finally:
        stop.set()
        await serving
        await server.stop(0)
        pod.close()


def _of_all(rounds: list[Trace]) -> Trace:
    """Return what every round passes, and the fewest calls: no more than one round is without what runs beside it."""
    places = [place for place in rounds[0].places if all(place in each.places for each in rounds)]
    return Trace(places, min(each.calls for each in rounds))


@contextmanager
def _traced() -> Iterator[Trace]:
    passed: dict[str, None] = {}
    calls = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event.endswith("call")
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            function = frame.f_code.co_qualname.replace(".<locals>", "")
            if not function.endswith(">"):  # comprehensions and lambdas are part of their function
                passed[f"{file.relative_to(PACKAGE)}:{function}"] = None

    found = Trace([], 0)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        found.places += passed
        found.calls = calls


async def _over_http(port: int, path: str, headers: dict[str, str], asked: dict[str, Any]) -> Trace:
    body = json.dumps(asked).encode()
    sent = {"host": "gateway", "content-length": str(len(body)), **_headers(headers)}
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with _traced() as passed:
        writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        answer = await reader.readuntil(b"{}")
        await asyncio.sleep(_AFTER_S)
    assert b" 200 " in answer, answer
    writer.close()
    return passed


async def _over_ext_proc(port: int | None, path: str, headers: dict[str, str], asked: dict[str, Any]) -> Trace:
    named = {":method": "POST", ":path": path, **_headers(headers)}
    lines = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in named.items()]
    first = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=lines)))
    body = pb.HttpBody(body=json.dumps(asked).encode(), end_of_stream=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        process = channel.stream_stream(
            f"/{SERVICE_NAME}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        await channel.channel_ready()
        with _traced() as passed:
            call = process()
            await call.write(first)
            answer = await call.read()
            if not answer.HasField("mode_override"):
                await call.write(pb.ProcessingRequest(request_body=body))
                answer = await call.read()
            assert await call.read() is grpc.aio.EOF
    assert not answer.HasField("immediate_response"), answer
    return passed


def _headers(more: dict[str, str]) -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}", "content-type": "application/json", **more}


def _settings(directory: Path, *, pod_port: int, manager_port: int) -> GatewaySettings:
    (directory / "secret").write_bytes(b"s" * 32)
    entry = {"sha256": hashlib.sha256(KEY.encode()).hexdigest(), "tenant": "demo"}
    (directory / "keys.json").write_text(json.dumps({"keys": [entry]}))
    return GatewaySettings(
        port=0,
        ext_proc_listen="127.0.0.1:0",
        manager=f"127.0.0.1:{manager_port}",
        endpoints=(EndpointSettings(name="pod-a", url=f"http://127.0.0.1:{pod_port}"),),
        secret_file=directory / "secret",
        api_keys_file=directory / "keys.json",
        probe_interval_s=_SELDOM_S,
    )


async def _commit_session(manager: ContextCacheManager) -> None:
    new = NewSession("demo", SESSION_ID, "stub-model", ttl_s=600)
    await manager.reserve(new, lease_id="l", lease_ttl_ms=1000)
    segment = Segment(SegmentKind.PROMPT, (1, 2, 3), text="hello")
    await manager.commit_turn(TurnCommit("demo", SESSION_ID, "l", 0, 0, (segment,), "ref_" + "a" * 32, "pod-a"))


async def _answer_as_pod(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while head := (await reader.readuntil(b"\r\n\r\n")).lower():
            size_bytes = next((int(line[16:]) for line in head.split(b"\r\n") if line[:15] == b"content-length:"), 0)
            await reader.readexactly(size_bytes)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
    except asyncio.IncompleteReadError:
        writer.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
