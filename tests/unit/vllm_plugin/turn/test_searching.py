"""Requests whose engine is gone before their prompt is tokenised, on a loop whose time does not take any.

Seen failing: each ended with 502 or 503 at once, because only a standby's engine was asked for the ids.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from contextcache.errors import EngineFailed
from contextcache.identity import Standby
from tests.kit.breaking_engine import BreakingEngine
from tests.kit.turn_bench import Pod
from vllm_plugin.turn.engine import Engine, body_then

pytestmark = pytest.mark.looptime

STANDBY = Standby("pod-b", "http://10.0.0.8:8000", "10.0.0.8:9000", "10.0.0.7:9000")
HI = [{"role": "user", "content": "Hi"}]
PATHS = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 8},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 8},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 8},
}
DIALECTS = pytest.mark.parametrize("path", PATHS)
GONE = pytest.mark.parametrize("how", ["killed", "drained", "torn"])


class Leaving(BreakingEngine):
    """`gone` for some seconds: `killed`, it answers nothing; `drained`, it is healthy and refuses; `torn`, both."""

    gone, until_s = "", 0.0

    def leave(self, how, seconds):
        self.gone, self.until_s = how, asyncio.get_running_loop().time() + seconds

    async def __call__(self, scope, receive, send):
        if asyncio.get_running_loop().time() >= self.until_s:
            await super().__call__(scope, receive, send)
            return
        is_health = scope["path"] == "/health"
        status = 503 if self.gone == "killed" else 200 if is_health or self.gone == "torn" else 500
        await send({"type": "http.response.start", "status": status, "headers": []})
        is_torn = self.gone == "torn"
        await send({"type": "http.response.body", "body": b'{"tok' if is_torn else b"{}", "more_body": is_torn})


class Choking(Leaving):
    """Fails to tokenise any text but an empty one."""

    async def __call__(self, scope, receive, send):
        message = await receive()
        if scope["path"] == "/tokenize" and json.loads(message["body"]).get("prompt") != "":
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
        else:
            await super().__call__(scope, body_then(message.get("body", b""), receive), send)


@pytest.fixture
def pod_of(tmp_path):
    def made(standby=None, **settings):
        pod = Pod(tmp_path, Leaving(), **({"resume_timeout_s": 60} | settings))
        pod.story.standbys = lambda said: standby
        pod.standby = None if standby is None else STANDBY
        return pod

    return made


async def asked(pod, path, *, how="killed", seconds=1e9, headers=(), **more):
    """Ask for a turn of a context whose engine is gone for `seconds`; return the context, the answer and its time."""
    session_id = (await pod.create(prompt="Hello", max_tokens=1)).json["session_id"]
    pod.engine.leave(how, seconds)
    begun_s = asyncio.get_running_loop().time()
    answer = await pod.ask(session_id, path=path, headers=headers, **PATHS[path] | more)
    return session_id, answer, asyncio.get_running_loop().time() - begun_s


async def is_free(pod, session_id):
    pod.engine.until_s = 0.0
    pod.gone.clear()
    return (await pod.ask(session_id, **PATHS["/v1/completions"])).status == 200


@DIALECTS
@GONE
@pytest.mark.parametrize("stream", [False, True])
async def test_the_own_engine_is_waited_for(pod_of, path, how, stream):
    pod = pod_of()

    session_id, answer, took_s = await asked(pod, path, how=how, seconds=33, stream=stream)

    assert (answer.status, answer.complete) == (200, True)
    assert took_s == pytest.approx(33, abs=1)
    session, _ = await pod.transcript(session_id)
    assert (session.generation, session.holder) == (2, "engine-0")


@DIALECTS
@GONE
async def test_the_standby_is_asked_at_once(pod_of, path, how):
    pod = pod_of(BreakingEngine("standby"))

    session_id, answer, took_s = await asked(pod, path, how=how)

    assert (answer.status, answer.complete, took_s) == (200, True, 0)
    session, _ = await pod.transcript(session_id)
    assert session.holder == "pod-b"


@DIALECTS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_create_waits_too(pod_of, path, stream):
    pod = pod_of()
    pod.engine.leave("drained", 20)

    answer = await pod.ask("mine", path=path, context_create="if_missing", stream=stream, **PATHS[path])

    assert (answer.status, answer.complete) == (200, True)


@DIALECTS
async def test_no_engine_within_the_limit_is_told_and_the_session_is_free(pod_of, path):
    pod = pod_of(resume_timeout_s=20)

    session_id, answer, took_s = await asked(pod, path)

    assert (answer.status, answer.complete) == (503, True)
    assert took_s == pytest.approx(20, abs=1)
    assert await is_free(pod, session_id)


@pytest.mark.parametrize("end", ["client", "shutdown"])
async def test_a_client_that_leaves_and_the_end_of_the_drain_end_the_wait(pod_of, end):
    pod = pod_of()
    asyncio.get_running_loop().call_later(7, pod.gone.set if end == "client" else pod.story.give_up)

    session_id, _, took_s = await asked(pod, "/v1/completions")

    assert took_s == pytest.approx(7, abs=1)
    assert await is_free(pod, session_id)


@pytest.mark.parametrize(("standby", "status", "after_s"), [(False, 502, 7), (True, 200, 20)])
async def test_the_own_engine_is_not_waited_for_while_the_pod_ends(pod_of, standby, status, after_s):
    """Seen failing: the client of a pod that ended waited 60 s for its error, and could not ask another pod."""
    other = BreakingEngine("standby")
    other.health, pod = 503, pod_of(other if standby else None)
    loop = asyncio.get_running_loop()
    loop.call_later(7, pod.app.draining.begin)
    loop.call_later(20, setattr, other, "health", 200)

    session_id, answer, took_s = await asked(pod, "/v1/completions", how="drained")

    assert (answer.status, answer.complete) == (status, True)
    assert took_s == pytest.approx(after_s, abs=1)
    pod.app.draining.value = False
    assert await is_free(pod, session_id)


@DIALECTS
@pytest.mark.parametrize("standby", [False, True])
async def test_a_prompt_that_engines_fail_to_tokenise_is_no_engine_that_is_gone(pod_of, path, standby):
    """Seen failing: such a request was held for TURN_RESUME_TIMEOUT_S, 60 s."""
    pod = pod_of(Choking("standby") if standby else None)
    session_id = (await pod.create(prompt="Hello", max_tokens=1)).json["session_id"]
    pod.engine.__class__ = Choking

    begun_s = asyncio.get_running_loop().time()
    answer = await pod.ask(session_id, path=path, **PATHS[path])

    assert (answer.status, answer.complete) == (502, True)
    assert asyncio.get_running_loop().time() - begun_s == pytest.approx(1, abs=1)
    pod.engine.__class__ = Leaving
    assert await is_free(pod, session_id)


async def test_a_piece_of_a_prompt_that_fails_is_computed_by_no_other_engine():
    """Seen failing: each piece of a background turn went to all engines for 60 s. Only KV of the own one is used."""
    engine = Engine(Choking(), {"headers": [], "path": "/"})
    engine.search = object()  # whose `call` is not there
    engine._app.leave("drained", 1e9)

    with pytest.raises(EngineFailed):
        await engine.prefill("m", [1], "salt")


async def test_a_client_may_opt_out(pod_of):
    _, answer, took_s = await asked(pod_of(), "/v1/completions", headers=[(b"x-context-resume", b"off")])

    assert (answer.status, took_s) == (503, 0)


async def test_a_client_that_wants_comments_gets_them_in_the_wait(pod_of):
    """Seen failing: comments began only when the engine had been asked for the answer."""
    pod, wanted = pod_of(), [(b"x-keep-alive-comments", b"10")]

    _, answer, _ = await asked(pod, "/v1/completions", seconds=33, headers=wanted, stream=True)

    assert answer.complete
    assert answer.body.startswith(b": keep-alive\n\n" * 3)


async def test_a_mistake_of_the_client_is_told_at_once(pod_of):
    class Strict(BreakingEngine):
        async def __call__(self, scope, receive, send):
            if scope["path"] != "/tokenize":
                await super().__call__(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b'{"error": {"message": "no such role"}}'})

    _, answer, took_s = await asked(pod_of(Strict("standby")), "/v1/chat/completions")

    assert (answer.status, took_s) == (400, 0)
    assert "no such role" in answer.json["error"]["message"]
