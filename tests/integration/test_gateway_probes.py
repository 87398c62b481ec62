"""What a kubelet asks of a gateway: whether it takes requests, not whether everything behind it is there."""

from __future__ import annotations

import asyncio

import aiohttp

from gateway.__main__ import serve
from tests.kit.gateway_server import settings_for
from tests.kit.ports import free_port
from tests.kit.stub_engine import StubEngine
from tests.kit.until import until

DEADLINE_S = 60
DRAIN_DELAY_S = 600.0


async def test_a_gateway_without_manager_and_pods_serves_until_it_drains(tmp_path) -> None:
    """Else one fault behind them takes every gateway out of its Service, requests without a context included."""
    gone = StubEngine()
    await gone.start()
    metrics_port = free_port()
    settings = settings_for(tmp_path, {"pod-a": gone}, manager_port=free_port(), metrics_port=metrics_port)
    settings = settings.model_copy(update={"drain_delay_s": DRAIN_DELAY_S})
    await gone.stop()
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(settings, stop, on_started=started.set_result))
    await asyncio.wait_for(started, DEADLINE_S)
    url = f"http://127.0.0.1:{metrics_port}"
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)

    async with aiohttp.ClientSession(timeout=timeout) as http:
        before = {path: (await http.get(url + path)).status for path in ("/healthz", "/serving", "/readyz")}
        page = await (await http.get(f"{url}/metrics")).text()
        stop.set()
        await until(
            lambda: http.get(f"{url}/serving"), is_so=lambda answer: answer.status == 503, what="it serves no more"
        )
        draining = (await http.get(f"{url}/healthz")).status
    serving.cancel()
    await asyncio.wait([serving])

    assert before == {"/healthz": 200, "/serving": 200, "/readyz": 503}
    assert "contextcache_gateway_ready_state 0.0" in page
    assert draining == 200
