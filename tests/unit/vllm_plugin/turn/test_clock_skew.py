"""A gateway whose clock is wrong costs contexts a 503 that says so, and plain requests nothing."""

import pytest

from contextcache.claim import TURN_PATHS
from contextcache.identity import Identity, sign_identity
from tests.kit.fake_vllm import FakeVllm
from tests.kit.turn_bench import SECRET, Pod

PATHS = sorted(TURN_PATHS)
KEPT = "kept_" + "1" * 32
BODY = {"model": "m", "prompt": "x", "input": "x", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}


class Anything(FakeVllm):
    """An engine that answers every call and remembers its body."""

    async def __call__(self, scope, receive, send):
        message = await receive()
        self.requests.append((scope["path"], message["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def pod(tmp_path):
    return Pod(tmp_path, Anything())


def signed(pod, *, behind_s, session_id=None, kept="", secret=SECRET):
    """Sign as a gateway does whose clock is behind the pod's."""
    now_ms = pod.clock.now_ms() - behind_s * 1000
    identity = Identity("demo", "req", now_ms + 60_000, session_id, kept=kept, issued_at_ms=now_ms)
    return sign_identity(identity, secret)


def value(pod, name):
    return pod.registry.get_sample_value(f"contextcache_turn_{name}")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kept", ["", KEPT])
async def test_a_plain_request_passes_as_a_plain_one(pod, path, kept):
    """Seen failing before: 401 for each of them while the gateway's clock was 90 s behind."""
    answer = await pod.post(path, BODY, signed(pod, behind_s=90, kept=kept))
    [(called, sent)] = pod.engine.requests

    assert (answer.status, called) == (200, path)
    assert b"kv_transfer_params" not in sent
    assert b"cache_salt" not in sent
    assert value(pod, "expired_identities_total") == 1


@pytest.mark.parametrize(("path", "session_id"), [("/v1/context", None), *((path, "ctx_1") for path in PATHS)])
async def test_a_create_and_a_turn_get_a_503_that_names_the_clocks(pod, path, session_id):
    """Seen failing before: 401 `invalid_identity`, as if the client's key were wrong."""
    answer = await pod.post(path, BODY, signed(pod, behind_s=90, session_id=session_id))
    error = answer.json["error"]

    assert (answer.status, error["code"], answer.headers["retry-after"]) == (503, "no_ready_endpoint", "5")
    assert "clocks of this pod and of the gateway differ" in error["message"]
    assert "90 s" in error["message"]
    assert pod.engine.requests == []
    assert value(pod, "gateway_clock_skew_seconds") == 90


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("behind_s", [-90, 0, 59])
async def test_a_clock_that_is_ahead_or_a_little_behind_costs_nothing_and_shows(pod, path, behind_s):
    answer = await pod.post(path, BODY, signed(pod, behind_s=behind_s, kept=KEPT))

    assert answer.status == 200
    assert value(pod, "gateway_clock_skew_seconds") == behind_s
    assert value(pod, "expired_identities_total") == 0


@pytest.mark.parametrize("path", [*PATHS, "/v1/context"])
@pytest.mark.parametrize("behind_s", [0, 90])
async def test_a_forged_signature_is_refused_whatever_the_clocks_say(pod, path, behind_s):
    answer = await pod.post(path, BODY, signed(pod, behind_s=behind_s, secret=b"another-secret-of-32-bytes-or-so"))

    assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_identity")
    assert pod.engine.requests == []
    assert value(pod, "gateway_clock_skew_seconds") == 0
