"""SIGTERM, as an orchestrator sends it: what runs ends well, what comes is refused or goes elsewhere, nothing is lost.

Seen failing: vLLM 0.32 alone (the middleware without `Draining`) kept `/health` at 200 while it drained and answered
new turns with 502 ("cannot schedule new futures after shutdown"), and a stream that outlasted `--shutdown-timeout`
stayed open without another byte until it was killed; with a toy pod that ends at once (`os._exit` in
`Draining`) its streams broke off.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from random import Random

import aiohttp
import httpx
import pytest

from tests.faults.races_model import Attempt, Told, explain
from tests.faults.races_world import World, send
from tests.faults.stack import KEY, MODEL, FaultStack

pytestmark = pytest.mark.timeout(600)

DRAIN_S = 20
NOISE_S = 30


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("drain"), with_gateways=True)
    try:
        world.start()
        yield world
    finally:
        world.stop()


class Load:
    """Clients that ask without a pause, one on each session."""

    def __init__(self, world, name, *, sessions=6):
        self.world, self.name = world, name
        self.attempts = {f"drain-{name}-{number}": [] for number in range(sessions)}
        self.is_over = False

    async def run(self, http, session_id, attempts):
        random = Random(session_id)
        while not self.is_over:
            attempt = Attempt(f"<{len(attempts)}>", is_create=not any(a.told is Told.COMMITTED for a in attempts))
            attempts.append(attempt)
            base = random.choice(self.world.gateway_urls)
            await send(http, base, session_id, attempt, stream=random.random() < 0.7)
            if attempt.told is not Told.COMMITTED:
                await asyncio.sleep(0.1)

    def all(self):
        return [attempt for attempts in self.attempts.values() for attempt in attempts]

    async def busiest_pod(self, http):
        """Return the pod that holds most of the sessions."""
        holders = Counter()
        for session_id in self.attempts:
            url = f"{self.world.gateway_urls[0]}/v1/context/{session_id}"
            async with http.get(url, headers={"authorization": f"Bearer {KEY}"}) as answer:
                holders[(await answer.json())["holder"]["endpoint"]] += 1
        return holders.most_common(1)[0][0]

    async def until_committed(self, count):
        async with asyncio.timeout(60):
            while sum(attempt.told is Told.COMMITTED for attempt in self.all()) < count:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", ["gateway", "manager", "pod"])
async def test_a_part_that_is_told_to_end_under_load_finishes_what_it_has_and_loses_no_turn(world, kind):
    load = Load(world, kind)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), connector=connector) as http:
        clients = [asyncio.create_task(load.run(http, *session)) for session in load.attempts.items()]
        await load.until_committed(12)
        process = {"gateway": world.gateways[0], "manager": world.managers[0]}.get(kind)
        if process is None:
            process = world.pods[await load.busiest_pod(http)]
        process.signal(signal.SIGTERM)
        returned = await asyncio.to_thread(process.process.wait, 60)
        ended_with = len(load.all())
        process.launch()
        await asyncio.to_thread(process.await_ready)
        await load.until_committed(sum(attempt.told is Told.COMMITTED for attempt in load.all()) + 12)
        load.is_over = True
        await asyncio.gather(*clients)

    told = Counter(attempt.why for attempt in load.all())
    print(f"{kind}: {len(load.all())} turns, {ended_with} when it had ended: {dict(told)}")
    assert returned in {0, -signal.SIGTERM}, process.log.read_text()[-2000:]
    # An answer that has begun comes to its end; what has not begun may find nobody there.
    assert [attempt for attempt in load.all() if attempt.why.startswith(("200", "a stream"))] == []
    for session_id, attempts in load.attempts.items():
        generation, text = await world.transcript(session_id)
        assert explain(attempts, life=0, generation=generation, text=text) == ""


class Stream(threading.Thread):
    """One streamed turn, read to its end or to where it breaks."""

    def __init__(self, stack, session_id, max_tokens):
        super().__init__(daemon=True)
        self.stack = stack
        self.body = {"model": MODEL, "prompt": " go on", "session_id": session_id, "stream": True}
        self.body |= {"max_tokens": max_tokens, "ignore_eos": True}
        self.events = []
        self.is_complete = False
        self.ended_at_s = 0.0

    def run(self):
        headers = {"authorization": f"Bearer {KEY}"}
        try:
            with httpx.stream(
                "POST", self.stack.front_url + "/v1/completions", json=self.body, headers=headers, timeout=240
            ) as answer:
                for line in answer.iter_lines():
                    data = line.removeprefix("data: ")
                    self.is_complete = self.is_complete or data == "[DONE]"
                    if data and not self.is_complete:
                        self.events.append(json.loads(data))
        except httpx.HTTPError:
            pass
        self.ended_at_s = time.monotonic()


def until(condition, *, within_s):
    ends_at = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < ends_at, "it did not become so in time"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    env = {"TURN_DRAIN_TIMEOUT_S": str(DRAIN_S), "GATEWAY_IDLE_TIMEOUT_S": "600"}
    arguments = ["--shutdown-timeout", str(DRAIN_S)]
    with FaultStack(tmp_path_factory.mktemp("drained"), engine_args=arguments, env=env, patient=True) as stack:
        yield stack


@pytest.fixture
def http(stack):
    with httpx.Client(base_url=stack.front_url, headers={"authorization": f"Bearer {KEY}"}, timeout=240) as client:
        yield client


@pytest.fixture
def engine(stack):
    with httpx.Client(base_url=stack.engine_urls[0], timeout=30) as client:
        yield client


def test_an_engine_that_is_told_to_end(stack, http, engine):
    """A sidecar first: its engine outlives it. Then vLLM: one answer ends in time, one does not."""

    def create(length):
        body = {"model": MODEL, "prompt": "a context of its own " * length, "max_tokens": 4, "ignore_eos": True}
        answer = http.post("/v1/context", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["session_id"]

    def get(session_id):
        return http.get(f"/v1/context/{session_id}").json()

    # The sidecar ends while a create is being saved.
    made = []
    creating = threading.Thread(target=lambda: made.append(create(60)), daemon=True)
    creating.start()
    time.sleep(0.1)
    took_s = stack.terminate("sidecar")
    stack.start("sidecar")
    creating.join(120)
    assert made, "the create was not answered"
    assert not list(stack.data().rglob("incoming/*"))
    print(f"sidecar gone after {took_s:.1f} s")

    def is_saved(session_id):
        return get(session_id)["holder"]["state"] == "sealed"

    # An engine asks for a sidecar that was gone after 0.25 s, 0.5 s and so on, and saves nothing meanwhile.
    until(lambda: is_saved(create(61)), within_s=120)

    # The engine ends: `brief` has few tokens to go, `endless` more than it will be given time for.
    brief_id, endless_id = create(20), create(21)
    until(lambda: is_saved(brief_id), within_s=120)
    brief, endless = Stream(stack, brief_id, 40), Stream(stack, endless_id, 1500)
    for stream in (endless, brief):
        stream.start()
        until(lambda stream=stream: len(stream.events) >= 2, within_s=60)
    pid, told_at_s = stack.pid("engine"), time.monotonic()
    os.kill(pid, signal.SIGTERM)  # the API server alone, as a kubelet does

    health = until(lambda: engine.get("/health").status_code == 503, within_s=NOISE_S)
    refused = http.post("/v1/context", json={"model": MODEL, "prompt": "x"})
    brief.join(DRAIN_S + NOISE_S)
    # Its last save is finished by an engine that drains; a core that stands still would keep it from that.
    until(lambda: is_saved(brief_id), within_s=DRAIN_S)
    for core in stack.engine_core_pids():
        os.kill(core, signal.SIGSTOP)
    endless.join(DRAIN_S + NOISE_S)
    stack.wait_gone("engine", within_s=NOISE_S + 60)

    outcome = brief.events[-1]["usage"]["context"]
    print(
        f"brief: {len(brief.events)} events, ended {brief.ended_at_s - told_at_s:.1f} s after SIGTERM to {pid}; "
        f"endless: {len(endless.events)} events, cut after {endless.ended_at_s - told_at_s:.1f} s"
    )
    assert health
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_ready_endpoint")
    assert int(refused.headers["retry-after"]) >= 1
    assert brief.is_complete
    assert outcome["committed"]
    assert get(brief_id)["generation"] == 2
    assert not endless.is_complete
    assert endless.ended_at_s - told_at_s < DRAIN_S + NOISE_S
    assert (get(endless_id)["generation"], get(endless_id)["state"]) == (1, "ready")
    # Its KV outlived the engine.
    assert is_saved(brief_id)
