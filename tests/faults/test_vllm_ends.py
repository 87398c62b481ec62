"""vLLM and its sidecar are told to end (SIGTERM, as an orchestrator does) in the middle of streams and saves.

The last file here: it leaves the engine ended. Seen failing: vLLM 0.32 alone (the turn process without `Draining`) kept
`/health` at 200 while it drained and answered new turns with 502 ("cannot schedule new futures after shutdown"), and a
stream that outlasted `--shutdown-timeout` stayed open without another byte until it was killed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial

import httpx
import pytest

from tests.kit.faults.whole_world import DRAIN_S
from tests.kit.stack import KEY, MODEL
from tests.kit.until import wait_until

pytestmark = pytest.mark.timeout(600)

NOISE_S = 30


class Stream(threading.Thread):
    """One streamed turn, read to its end or to where it breaks."""

    def __init__(self, stack, session_id, max_tokens):
        super().__init__(daemon=True)
        self.stack = stack
        self.body = {"model": MODEL, "prompt": " go on", "session_id": session_id, "stream": True}
        self.body |= {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        self.events = []
        self.is_complete = False
        self.ended_at_s = 0.0

    @property
    def text(self):
        return "".join(choice["text"] for event in self.events for choice in event["choices"])

    def run(self):
        headers = {"authorization": f"Bearer {KEY}"}
        try:
            with httpx.stream(
                "POST", self.stack.front_url + "/v1/completions", json=self.body, headers=headers, timeout=400
            ) as answer:
                for line in answer.iter_lines():
                    data = line.removeprefix("data: ") if line.startswith("data: ") else ""
                    self.is_complete = self.is_complete or data == "[DONE]"
                    if data and not self.is_complete:
                        self.events.append(json.loads(data))
        except httpx.HTTPError:
            pass
        self.ended_at_s = time.monotonic()


@pytest.fixture
def stack(_world):
    """With a gateway that waits for a silent engine: what cuts its streams is the engine's own deadline."""
    _world.mend()
    _world.stack.restart("gateway", GATEWAY_IDLE_TIMEOUT_S="600")
    return _world.stack


@pytest.fixture
def http(stack):
    with httpx.Client(base_url=stack.front_url, headers={"authorization": f"Bearer {KEY}"}, timeout=240) as client:
        yield client


@pytest.fixture
def turn(stack):
    with httpx.Client(base_url=stack.turn_urls[0], timeout=30) as client:
        yield client


@pytest.mark.thorough
def test_an_engine_that_is_killed_in_the_middle_of_a_stream_loses_no_token_of_it(stack, http):
    """The client's connection stays. Text and usage are those of the same prompt at an engine that lives."""
    stack.restart("turn", TURN_RESUME_TIMEOUT_S="400")
    stack.wait_ready()
    body = {"model": MODEL, "prompt": "a context of its own " * 20, "max_tokens": 4, "temperature": 0}
    whole, broken = (Stream(stack, http.post("/v1/context", json=body).json()["session_id"], 400) for _ in range(2))
    whole.start()
    whole.join(120)

    broken.start()
    wait_until(lambda: len(broken.events) >= 20, what="the stream has begun")
    stack.kill("engine")
    num_before = len(broken.events)
    stack.start("engine")
    broken.join(400)

    assert whole.is_complete
    assert broken.is_complete
    (resumed,) = broken.events[-1]["usage"]["context"]["resumed"]
    print(f"{num_before} events before the kill: {resumed}")
    assert 0 < resumed["at_token"] < 400
    assert broken.text == whole.text
    counts = [stream.events[-1]["usage"]["completion_tokens"] for stream in (whole, broken)]
    assert counts == [400, 400]
    assert http.get(f"/v1/context/{broken.body['session_id']}").json()["generation"] == 2


@pytest.mark.thorough
def test_an_engine_that_is_told_to_end(stack, http, turn):
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
    print(f"sidecar gone after {took_s:.1f} s")

    def is_saved(session_id):
        return get(session_id)["holder"]["state"] == "sealed"

    # An engine asks for a sidecar that was gone after 0.25 s, 0.5 s and so on, and saves nothing meanwhile.
    wait_until(lambda: is_saved(create(61)), what="saves go on", deadline_s=120)

    # The engine ends: `brief` has few tokens to go, `endless` more than it will be given time for.
    brief_id, endless_id = create(20), create(21)
    wait_until(lambda: is_saved(brief_id), what="the context is saved", deadline_s=120)
    brief, endless = Stream(stack, brief_id, 40), Stream(stack, endless_id, 1500)
    for stream in (endless, brief):
        stream.start()
        wait_until(lambda stream=stream: len(stream.events) >= 2, what="the stream has begun")
    pid, told_at_s = stack.pid("engine"), time.monotonic()
    for part in ("turn", "engine"):  # each container's first process, as a kubelet does
        os.kill(stack.pid(part), signal.SIGTERM)

    health = wait_until(lambda: turn.get("/health").status_code == 503, what="the engine says that it ends")
    refused = http.post("/v1/context", json={"model": MODEL, "prompt": "x"})
    brief.join(DRAIN_S + NOISE_S)
    # Its last save is finished by an engine that drains; a core that stands still would keep it from that.
    wait_until(lambda: is_saved(brief_id), what="the last turn is saved", deadline_s=DRAIN_S)
    for core in stack.engine_core_pids():
        os.kill(core, signal.SIGSTOP)
    endless.join(DRAIN_S + NOISE_S)
    stack.wait_gone("engine", deadline_s=NOISE_S + 60)
    lent = partial(stack.counted, "sidecar", "contextcache_sidecar_lent_bytes")
    wait_until(lambda: not lent(), what="nothing is lent to an engine that has ended")

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
