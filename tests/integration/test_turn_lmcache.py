"""The turn process where LMCache keeps KV: it answers the gateway at the sidecar's port."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import httpx
import uvicorn

from contextcache.clock import SystemClock
from contextcache.identity import Identity, sign_identity
from kv_sidecar.client import KVSidecarClient
from tests.kit.fake_vllm import FakeVllm
from tests.kit.gateway_parts import SECRET
from tests.kit.lmcache_fake import FakeLMCache
from tests.kit.manager_process import running_manager_process
from tests.kit.ports import free_port
from tests.kit.turn_process import running_turn_process

DEADLINE_S = 60
PROMPT = "x" * 600
"""Two chunks, and a tail: a token is a letter."""


@asynccontextmanager
async def served(app):
    """Serve an ASGI application over HTTP; yields its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, ws="none"))
        serving = asyncio.create_task(server._serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving, DEADLINE_S)


async def test_a_delete_of_the_gateway_reaches_lmcache_through_the_turn_process(tmp_path, valkey):
    """Seen failing without `story.kv.start()` in the process."""
    lmcache, listen = FakeLMCache(), f"127.0.0.1:{free_port()}"
    vllm = FakeVllm()

    def answer(ids):
        # As LMCache's connector saves the prompt.
        lmcache.store(vllm.generations()[-1]["cache_salt"], ids)
        return "!"

    vllm.answer = answer
    identity = Identity("demo", "req", SystemClock().now_ms() + 60_000)
    signed = {"x-context-identity": sign_identity(identity, SECRET)}
    async with (
        running_manager_process(tmp_path, valkey.url) as manager,
        served(vllm) as engine_url,
        served(lmcache) as lmcache_url,
        running_turn_process(
            tmp_path,
            engine_url,
            TURN_MANAGER=manager.address,
            TURN_LMCACHE_URL=lmcache_url,
            TURN_LMCACHE_COORDINATOR_URL=lmcache_url,
            TURN_LMCACHE_MODEL="m",
            TURN_LMCACHE_LISTEN=listen,
        ) as turn,
        httpx.AsyncClient(base_url=turn.url, headers=signed, timeout=DEADLINE_S) as http,
    ):
        created = await http.post("/v1/context", json={"model": "m", "prompt": PROMPT})
        assert created.status_code == 200, created.text
        stored = len(lmcache.stored)
        gateway = KVSidecarClient(listen, timeout_s=DEADLINE_S)
        freed_bytes = await gateway.delete_context("demo", session_id=created.json()["session_id"])
        await gateway.close()

    assert stored == 2
    assert lmcache.stored == set()
    assert freed_bytes > 0
