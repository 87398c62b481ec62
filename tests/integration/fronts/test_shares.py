"""One tenant floods a pod through a front; the other one's requests are taken all the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import aiohttp
import pytest

from tests.kit.fake_vllm import _json
from tests.kit.fronts import Client, running_front
from tests.kit.gateway_parts import OTHER_KEY
from tests.kit.gateway_server import settings_for
from tests.kit.turn_pod import MODEL, running_turn_pod
from tests.kit.until import until

OTHER = {"authorization": f"Bearer {OTHER_KEY}"}
ASKED = {"model": MODEL, "prompt": "x"}
FLOOD = 500
BATCH = 8
SHARE = BATCH // 2
"""More may be refused after the next probe of the pod, which has seen them."""
WAITING = '{endpoint="pod-a",state="waiting"}'


class Batch:
    """An engine that computes BATCH requests at a time once it may, and says so in its metrics."""

    def __init__(self):
        self.may_go_on = asyncio.Event()
        self.room = asyncio.Semaphore(BATCH)
        self.running = self.waiting = 0

    async def __call__(self, scope, receive, send):
        if scope["path"].startswith("/metrics"):
            page = f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting {self.waiting}\n"
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": page.encode()})
            return
        await receive()
        self.waiting += 1
        async with self.room:
            self.waiting -= 1
            self.running += 1
            await self.may_go_on.wait()
            self.running -= 1
        await _json(send, 200, {})


async def asked(client, headers=None) -> int:
    async with client.post("/v1/completions", ASKED, headers=headers or {}) as answer:
        await answer.read()
        return answer.status


@pytest.mark.parametrize("num_addresses", [1, 2])
async def test_a_flood_gets_the_429s_and_the_other_tenant_none(tmp_path, manager, front_kind, num_addresses):
    """Seen failing before, at both fronts: 429 for the other tenant in 12 of 12 attempts.

    Seen failing behind Envoy at two addresses, with requests of a full pod past its turn process: the flood had no 429.
    """
    engine = Batch()
    async with running_turn_pod(tmp_path, manager_port=manager.port, engine=engine) as pod:
        pods, turns = {"pod-a": pod}, None
        if num_addresses == 2:
            pods, turns = {"pod-a": SimpleNamespace(url=pod.engine_url)}, {"pod-a": pod}
        settings = settings_for(tmp_path, pods, turns=turns, manager_port=manager.port)
        async with (
            running_front(front_kind, settings, num_ready=1) as front,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            client = Client(front.port, session)
            flood = [asyncio.create_task(asked(client)) for _ in range(FLOOD)]
            await until(
                lambda: front.gateway.metric("contextcache_gateway_endpoint_load_requests", WAITING),
                is_so=lambda waiting: waiting > 256,
                what="the gateway knows of a full queue",
            )
            others = [asyncio.create_task(asked(client, OTHER)) for _ in range(SHARE)]
            late = [await asked(client) for _ in range(12)]
            engine.may_go_on.set()
            found = Counter(await asyncio.gather(*flood)), [await other for other in others]

    assert found[1] == [200] * SHARE
    assert late == [429] * 12
    assert found[0][200] + found[0][429] == FLOOD
