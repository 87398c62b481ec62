"""One trace id a turn: gateway, turn, manager, sidecar and connector, each with its own tracer, over real wires.

The engine is a toy on both sides: HTTP answers come from FakeVllm, KV from vLLM's real scheduler with our real
connector around a toy model.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    # vLLM and torch warn about themselves while they are imported; from here on warnings are errors again.
    warnings.simplefilter("ignore")
    import torch._inductor.compile_fx  # noqa: F401  # imported by vLLM at a moment of its choosing
    import vllm.v1.core.sched.scheduler  # noqa: F401  # brings in everything else

from context_manager.__main__ import serve as serve_manager
from context_manager.settings import ManagerSettings
from contextcache.errors import SidecarUnavailable
from contextcache.identity import KV_TRANSFER_KEY, verify_kv_transfer
from contextcache.wire.tracing import NO_TRACER, open_tracer
from kv_sidecar.__main__ import run as run_sidecar
from kv_sidecar.client import KVSidecarClient
from kv_sidecar.settings import SidecarSettings
from tests.kit import patience
from tests.kit.ext_proc import ExtProcClient, body, head
from tests.kit.fake_vllm import FakeVllm
from tests.kit.gateway_parts import SECRET
from tests.kit.gateway_server import running_gateway, settings_for
from tests.kit.ports import free_port
from tests.kit.scheduler_loop import LoopConfig, SchedulerLoop
from tests.kit.trace_collector import TakenSpan, TraceCollector, running_collector
from tests.kit.turn_pod import MODEL, running_turn_pod
from tests.kit.until import until
from tests.kit.valkey import ValkeyServer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KEPT = f"00-{TRACE}-{PARENT}-01"
NOT_KEPT = f"00-{TRACE}-{PARENT}-00"
SERVER = 2
SERVICES = {f"context-cache-{part}" for part in ("gateway", "turn", "manager", "sidecar", "connector")}
KV_PARAMS = "kv_transfer_params"
DEADLINE_S = 90
CONFIG = (
    '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,'
    ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,'
    ' "vocab_size": 1000, "max_position_embeddings": 2048}'
)


class EngineWithKV(FakeVllm):
    """Runs each completion through a scheduler with the connector first, as the engine behind the server does."""

    loop: SchedulerLoop

    async def _complete(self, scope: Any, request: dict[str, Any], send: Any) -> None:
        await asyncio.to_thread(self._run, f"engine-{len(self.requests)}", request)
        await super()._complete(scope, request, send)

    def _run(self, name: str, request: dict[str, Any]) -> None:
        self.loop.forget_prefixes()
        self.loop.play(name, request["prompt"], params=request["kv_transfer_params"])


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@asynccontextmanager
async def until_stopped(run: Callable[[asyncio.Event], Any]) -> AsyncIterator[None]:
    """Run a process's body beside the block, and end it as SIGTERM would."""
    stop = asyncio.Event()
    task = asyncio.create_task(run(stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, DEADLINE_S)


class Deployment:
    """All five parts; `post` sends a request of a client's."""

    def __init__(self, gateway: Any, engine: EngineWithKV) -> None:
        self.gateway = gateway
        self.engine = engine

    async def post(self, path: str, request: dict[str, Any], *, traceparent: str = "") -> dict[str, Any]:
        headers = {"traceparent": traceparent} if traceparent else {}
        async with self.gateway.post(path, {"model": MODEL, **request}, headers=headers) as answer:
            raw = await answer.read()
            assert answer.status == 200, raw
            return json.loads(raw)


@asynccontextmanager
async def running_sidecar(tmp_path: Path, endpoint: str) -> AsyncIterator[str]:
    settings = SidecarSettings(
        unix_socket=tmp_path / "s.sock",
        listen="",
        data_dir=tmp_path / "data",
        memory_limit_bytes=64 << 20,
        block_tokens=64,
        traces_endpoint=endpoint,
    )
    address = f"unix://{tmp_path}/s.sock"
    async with until_stopped(lambda stop: run_sidecar(settings, stop)):
        client = KVSidecarClient(address, timeout_s=20)
        await until(client.stats, what="the sidecar serves", despite=(SidecarUnavailable,))
        await client.close()
        yield address


@asynccontextmanager
async def running_deployment(
    tmp_path: Path, valkey: ValkeyServer, endpoint: str, *, sample_ratio: float = 1.0
) -> AsyncIterator[Deployment]:
    port = free_port()
    manager = ManagerSettings(
        listen=f"127.0.0.1:{port}", redis_url=valkey.url, redis_timeout_s=15, traces_endpoint=endpoint
    )
    (tmp_path / "config.json").write_text(CONFIG)
    tracer = open_tracer(endpoint, part="turn", sample_ratio=sample_ratio, on_lost=lambda _num: None)
    engine = EngineWithKV()
    async with (
        until_stopped(lambda stop: serve_manager(manager, stop)),
        running_sidecar(tmp_path, endpoint) as sidecar,
        running_turn_pod(
            tmp_path,
            manager_port=port,
            engine=engine,
            sidecar=KVSidecarClient(sidecar, timeout_s=20),
            tracer=tracer,
            rpc_deadline_ms=20_000,
        ) as pod,
    ):
        engine.loop = await asyncio.to_thread(started_loop, tmp_path, sidecar, endpoint)
        settings = settings_for(
            tmp_path,
            {"pod-a": pod},
            manager_port=port,
            manager_timeout_s=20,
            traces_endpoint=endpoint,
            traces_sample_ratio=sample_ratio,
            ext_proc_listen="127.0.0.1:0",
        )
        try:
            async with running_gateway(settings, num_ready=1) as gateway:
                yield Deployment(gateway, engine)
        finally:
            await asyncio.to_thread(engine.loop.close)


def started_loop(tmp_path: Path, sidecar: str, endpoint: str) -> SchedulerLoop:
    extra = {"sidecar": sidecar, "secret_file": str(tmp_path / "pod-secret"), "traces_endpoint": endpoint}
    extra |= patience.CONNECTOR
    loop = SchedulerLoop(LoopConfig(tmp_path, "vllm_plugin.connector:ContextCacheConnector", extra=extra))
    loop.settle()
    return loop


async def test_a_turn_is_one_trace_from_the_gateway_to_the_connector(tmp_path: Path, valkey: ValkeyServer) -> None:
    async with running_collector() as collector, running_deployment(tmp_path, valkey, collector.endpoint) as deployment:
        created = await deployment.post("/v1/context", {"prompt": "a" * 200, "max_tokens": 4})
        answered = await deployment.post(
            "/v1/completions",
            {"prompt": "b" * 30, "max_tokens": 4, "session_id": created["session_id"]},
            traceparent=KEPT,
        )
        assert answered["usage"]["context"]["committed"]
        await until(lambda: what_is_missing(collector), is_so=lambda missing: not missing, what="the whole trace came")

    spans = spans_of_the_turn(collector)
    assert {span.service for span in spans} == SERVICES
    root = collector.one("gateway turn")
    assert root.parent_id == PARENT
    known = {span.span_id for span in spans} | {PARENT}
    assert all(span.parent_id in known for span in spans), "every span hangs on another of the same trace"
    (commit,) = [s for s in spans if s.name.endswith("/CommitTurn") and s.kind == SERVER]
    assert collector.ancestry(commit) == [
        ("context-cache-manager", "contextcache.v1.ContextManagerService/CommitTurn"),
        ("context-cache-turn", "contextcache.v1.ContextManagerService/CommitTurn"),
        ("context-cache-turn", "turn /v1/completions"),
        ("context-cache-gateway", "gateway turn"),
    ]
    (blocks,) = [s for s in spans if s.name.endswith("/LoadBlocks")]
    assert collector.ancestry(blocks) == [
        ("context-cache-sidecar", "contextcache.v1.KVSidecarService/LoadBlocks"),
        ("context-cache-connector", "connector load"),
        ("context-cache-turn", "turn generate"),
        ("context-cache-turn", "turn /v1/completions"),
        ("context-cache-gateway", "gateway turn"),
    ]
    (seal,) = [s for s in spans if s.name.endswith("/Seal") and s.kind == SERVER]
    assert ("context-cache-connector", "connector save: seal") in collector.ancestry(seal)
    assert collector.one("turn /v1/completions").attributes["contextcache.session_id"] == created["session_id"]
    assert not [span for span in spans if span.failed]


def spans_of_the_turn(collector: TraceCollector) -> list[TakenSpan]:
    return [span for span in collector.spans if span.trace_id == TRACE]


def what_is_missing(collector: TraceCollector) -> set[str]:
    """Return which services and spans have not come, and whose parents; each part sends its own, when it likes."""
    spans = spans_of_the_turn(collector)
    missing = SERVICES - {span.service for span in spans}
    missing |= {"gateway turn", "turn /v1/completions", "connector save: seal"} - {span.name for span in spans}
    served = {span.name.rpartition("/")[2] for span in spans if span.kind == SERVER}
    missing |= {"CommitTurn", "LoadBlocks", "Seal"} - served
    known = {span.span_id for span in spans} | {PARENT}
    return missing | {f"parent of {span.name}" for span in spans if span.parent_id not in known}


def turn_spans(collector: TraceCollector, name: str) -> list[TakenSpan]:
    return [span for span in collector.named(name) if span.trace_id == TRACE]


async def test_no_span_names_a_tenant_a_key_or_a_word_of_a_prompt(tmp_path: Path, valkey: ValkeyServer) -> None:
    async with running_collector() as collector, running_deployment(tmp_path, valkey, collector.endpoint) as deployment:
        await deployment.post("/v1/context", {"prompt": "platypus " * 20, "max_tokens": 4})
        await collector.until(lambda: len(collector.named("connector save: hand over")) > 0)
        await collector.until(lambda: len(collector.named("gateway create")) > 0)

    told = " ".join(f"{span.name} {span.attributes}" for span in collector.spans)
    assert "ctx_" in told
    for secret in ("platypus", "demo", "test-key", "Bearer"):
        assert secret not in told


async def test_a_trace_its_caller_does_not_keep_is_kept_by_nobody_and_begun_by_nobody(
    tmp_path: Path, valkey: ValkeyServer
) -> None:
    async with running_collector() as collector, running_deployment(tmp_path, valkey, collector.endpoint) as deployment:
        await deployment.post("/v1/context", {"prompt": "a" * 20, "max_tokens": 4}, traceparent=NOT_KEPT)
        (generated,) = [body for body in deployment.engine.generations() if KV_PARAMS in body]
        assert verify_kv_transfer(generated[KV_PARAMS][KV_TRANSFER_KEY], SECRET).traceparent == ""
        # Another request, which is kept, comes after it: what the first one left would be there by then.
        await deployment.post("/v1/context", {"prompt": "a" * 20, "max_tokens": 4}, traceparent=KEPT)
        await collector.until(lambda: len(turn_spans(collector, "gateway create")) > 0)

    assert len(collector.named("gateway create")) == 1
    assert len(collector.named("turn /v1/context")) == 1


async def test_behind_envoy_the_trace_goes_on_to_the_pod(tmp_path: Path, valkey: ValkeyServer) -> None:
    async with running_collector() as collector, running_deployment(tmp_path, valkey, collector.endpoint) as deployment:
        envoy = ExtProcClient(deployment.gateway.ext_proc_port)
        request = body({"model": MODEL, "prompt": "a", "max_tokens": 1})
        answers = await envoy.ask(head("/v1/context", headers={"traceparent": KEPT}), request)
        await envoy.close()
        await collector.until(lambda: len(turn_spans(collector, "gateway create")) > 0)

    span = collector.one("gateway create")
    assert span.parent_id == PARENT
    assert answers[-1].set_headers["traceparent"] == f"00-{TRACE}-{span.span_id}-01"


async def test_a_collector_that_refuses_or_is_not_there_costs_a_count_and_no_answer(
    tmp_path: Path, valkey: ValkeyServer
) -> None:
    async with running_collector() as collector:
        collector.refuses = True
        async with running_deployment(tmp_path, valkey, collector.endpoint) as deployment:
            await deployment.post("/v1/context", {"prompt": "a" * 20, "max_tokens": 4}, traceparent=KEPT)
            lost = lambda: deployment.gateway.metric("contextcache_gateway_lost_spans_total")
            await until(lost, what="lost spans are counted")
    assert collector.spans == []


async def test_without_a_collector_nobody_traces_and_what_the_client_says_passes_untouched(
    tmp_path: Path, valkey: ValkeyServer
) -> None:
    async with running_deployment(tmp_path, valkey, "") as deployment:
        assert deployment.gateway is not None
        await deployment.post("/v1/context", {"prompt": "a" * 20, "max_tokens": 4}, traceparent=KEPT)
    assert open_tracer("", part="x", sample_ratio=1, on_lost=print) is NO_TRACER
