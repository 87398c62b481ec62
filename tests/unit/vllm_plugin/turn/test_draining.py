"""A pod that was told to end: new work is refused, what runs goes on, and its last calls are made before it is gone.

Seen failing: without the check in the middleware the turn was begun. The process itself, its signals and its last
calls: tests/integration/test_turn_process.py.
"""

import asyncio
from dataclasses import replace

import pytest

from contextcache.identity import read_identity, sign_identity
from tests.kit.fake_vllm import FakeVllm
from tests.kit.turn_bench import SECRET, Pod
from tests.kit.until import until


async def test_new_turns_stateless_requests_and_probes_are_refused_and_a_running_turn_ends(pod):
    session_id = (await pod.create(prompt="Hello")).json["session_id"]
    pod.engine.pause = asyncio.Event()
    pod.engine.answer = lambda ids: "abc"
    running = asyncio.create_task(pod.ask(session_id, prompt=" x", stream=True))
    await until(lambda: len(pod.engine.generations()) == 2, what="the turn runs", interval_s=0)

    pod.app.draining.value = True
    refused = [
        await pod.create(prompt="y"),
        await pod.ask(session_id, prompt="y"),
        await pod.post("/v1/completions", {"model": "m", "prompt": "y"}),
        await pod.get("/health"),
    ]
    pod.engine.pause.set()
    answer = await running

    for other in refused:
        assert (other.status, other.json["error"]["code"]) == (503, "no_ready_endpoint")
        assert other.headers["retry-after"] == "1"
    assert answer.complete
    assert answer.events[-1]["usage"]["context"]["committed"]
    assert (await pod.get("/metrics")).status == 404  # the application's own answer


@pytest.mark.looptime
async def test_a_turn_that_outlasts_the_drain_is_cut_and_its_session_free(pod):
    """vLLM kills its engine and leaves the stream open. Seen failing: without `give_up` it never ended."""
    session_id = (await pod.create(prompt="Hello")).json["session_id"]
    pod.engine.pause, pod.engine.answer = asyncio.Event(), lambda ids: "abc"
    running = asyncio.create_task(pod.ask(session_id, prompt=" x", stream=True))
    await until(lambda: len(pod.engine.generations()) == 2, what="the turn runs", interval_s=0)

    pod.app.draining._timeout_s = 1
    pod.app.draining.begin()
    answer = await asyncio.wait_for(running, 60)

    pod.app.draining.value = False
    pod.engine.pause = None
    assert not answer.complete
    assert (await pod.ask(session_id, prompt=" y")).headers["x-context-generation"] == "2"


@pytest.mark.looptime
@pytest.mark.parametrize("end", ["client", "shutdown"])
async def test_background_work_ends_with_its_client_or_its_process_and_leaves_no_context(tmp_path, end):
    """Seen failing: the engine computed the other pieces, and then the answer, for a client that had left."""
    asked = asyncio.Event()

    class Slow(FakeVllm):
        async def __call__(self, scope, receive, send):
            if scope["path"] == "/v1/completions":
                asked.set()
                await asyncio.sleep(20)
            await super().__call__(scope, receive, send)

    pod = Pod(tmp_path, Slow())
    identity = sign_identity(replace(read_identity(pod.identity(), SECRET), background=True), SECRET)
    body = {"model": "m", "prompt": "x" * 900, "max_tokens": 0, "session_id": "new"}
    creating = asyncio.create_task(pod.post("/v1/context", body, identity))
    await asked.wait()
    pod.app.draining._timeout_s = 1
    pod.gone.set() if end == "client" else pod.app.draining.begin()
    answer = await asyncio.wait_for(creating, 15)

    assert answer.status == 503
    assert not pod.engine.generations()
    pod.app.draining.value = False
    pod.gone.clear()
    assert (await pod.create(prompt="x", session_id="new")).status == 200
