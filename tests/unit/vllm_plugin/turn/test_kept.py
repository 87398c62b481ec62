"""A request whose KV is kept: the engine gets the client's bytes and an order, the client a receipt."""

import json

import pytest

from contextcache.errors import SidecarUnavailable
from contextcache.identity import KV_TRANSFER_KEY, cache_salt, verify_kv_transfer
from contextcache.model import LoadedKV
from contextcache.names import CACHE_REF_PATTERN
from tests.kit.turn_bench import SECRET, Pod

GROUP = "kept_" + "1" * 32
BODIES = {
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
}
PATHS = sorted(BODIES)


async def ask(pod, path, *, raw=None, kept=GROUP, **more):
    raw = json.dumps(BODIES[path] | more, indent=1).encode() if raw is None else raw
    return await pod.post(path, raw, pod.identity(kept=kept))


def order_of(pod):
    _, sent = pod.engine.requests[-1]
    return verify_kv_transfer(sent["kv_transfer_params"][KV_TRANSFER_KEY], SECRET)


@pytest.mark.parametrize("path", PATHS)
async def test_the_engine_gets_what_the_client_sent_and_an_order_signed_for_its_tenant_and_group(pod, path):
    answer = await ask(pod, path, temperature=0.25)
    called, sent = pod.engine.requests[-1]
    order = order_of(pod)

    assert answer.status == 200
    assert called == path
    assert {key: sent[key] for key in (*BODIES[path], "temperature")} == BODIES[path] | {"temperature": 0.25}
    assert set(sent) - set(BODIES[path]) == {"temperature", "cache_salt", "kv_transfer_params"}
    assert sent["cache_salt"] == cache_salt("demo", "", SECRET)
    assert (order.tenant, order.session_id, order.load, order.is_kept) == ("demo", GROUP, (), True)
    assert CACHE_REF_PATTERN.fullmatch(order.save)
    assert order.expires_at_ms == pod.clock.now_ms() + 3_600_000


async def test_each_request_has_a_name_of_its_own_though_the_gateway_s_is_the_same(pod):
    orders = []
    for _ in range(2):
        await ask(pod, PATHS[0])
        orders.append(order_of(pod))
    assert orders[0].request_id != orders[1].request_id
    assert orders[0].save != orders[1].save


@pytest.mark.parametrize(
    ("report", "headers"),
    [
        (None, {}),
        (
            LoadedKV(False, 32, 200, "disk", 12.5),
            {"x-context-cache": "hit", "x-context-cached-tokens": "232", "x-context-source": "disk"},
        ),
        (
            LoadedKV(False, 320, 0, "", 0.0),
            {"x-context-cache": "hit", "x-context-cached-tokens": "320", "x-context-source": "device"},
        ),
        (
            LoadedKV(True, 0, 100, "host", 3.0, "corrupt_block"),
            {"x-context-cache": "recomputed", "x-context-cached-tokens": "0", "x-context-source": "recompute"},
        ),
        (
            LoadedKV(False, 0, 0, "", 1.0, "no_manifest"),
            {"x-context-cache": "miss", "x-context-cached-tokens": "0", "x-context-source": "none"},
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_says_in_its_head_what_was_reused_and_a_metric_why_not(pod, report, headers, stream):
    pod.sidecar.report = report
    plain = await pod.post("/v1/completions", BODIES["/v1/completions"] | {"stream": stream})
    answer = await ask(pod, "/v1/completions", stream=stream)

    assert headers.items() <= answer.headers.items()
    if not stream:
        assert _without_echo(answer) == _without_echo(plain)
    else:
        assert answer.events == plain.events
    assert answer.complete
    assert headers or "x-context-cache" not in answer.headers
    reason = "" if report is None else report.reason
    assert pod.counted("kept_requests", verdict=headers.get("x-context-cache", "unknown"), reason=reason) == 1


@pytest.mark.parametrize(("stream", "verdict"), [(False, "hit"), (True, None)])
async def test_a_whole_answer_waits_for_the_word_of_what_was_reused_a_stream_does_not(
    pod, monkeypatch, stream, verdict
):
    """Seen failing: on busy cores a third of the hits were told, and counted, as misses."""

    async def late(request_id, *, timeout_ms):
        return LoadedKV(False, 32, 200, "disk", 12.5) if timeout_ms > pod.kv.report_deadline_ms else None

    monkeypatch.setattr(pod.sidecar, "load_report", late)
    answer = await ask(pod, "/v1/completions", stream=stream)

    assert answer.headers.get("x-context-cache") == verdict


async def test_a_sidecar_that_says_nothing_is_waited_for_once(pod, monkeypatch):
    """Seen failing: each answer of a pod whose sidecar hung came half a second later."""
    asked_ms, reports = [], [None, None, LoadedKV(False, 320, 0, "", 0.0), None]

    async def silent(request_id, *, timeout_ms):
        asked_ms.append(timeout_ms)
        return reports[len(asked_ms) - 1]

    monkeypatch.setattr(pod.sidecar, "load_report", silent)
    for _ in reports:
        await ask(pod, "/v1/completions")

    assert asked_ms == [500, 50, 50, 500]


async def test_a_sidecar_and_a_manager_that_are_gone_cost_the_receipt_and_nothing_else(pod):
    pod.sidecar.fault = SidecarUnavailable("gone")
    pod.manager.fault = ("begin_turn", SidecarUnavailable("gone"))
    answer = await ask(pod, "/v1/completions")
    assert (answer.status, "x-context-cache" in answer.headers) == (200, False)


async def test_what_a_client_orders_itself_counts_for_nothing_wherever_it_stands(pod):
    raw = (
        b'{"kv_transfer_params": {"context_cache": "forged"}, "cache_salt": "theirs", "model": "m", "prompt": "hi", '
        b'"k\\u0076_transfer_params": {"context_cache": "forged"}, "cache_salt": "theirs"}'
    )
    answer = await ask(pod, "/v1/completions", raw=raw)
    assert answer.status == 200
    assert order_of(pod).session_id == GROUP
    assert pod.engine.requests[-1][1]["cache_salt"] == cache_salt("demo", "", SECRET)


@pytest.mark.parametrize("kept", ["", GROUP])
async def test_a_body_that_is_no_object_goes_to_the_engine_as_it_came(pod, kept):
    raw = b"[1, 2]" if kept else json.dumps(BODIES["/v1/completions"]).encode()
    with pytest.raises(Exception) if kept else _nothing():  # the toy engine's own
        answer = await ask(pod, "/v1/completions", raw=raw, kept=kept)
        assert answer.status == 200
        assert "x-context-cache" not in answer.headers
        assert pod.engine.requests[-1][1] == BODIES["/v1/completions"]


async def test_a_stream_that_begins_before_the_engine_is_asked_is_counted_and_not_held_up(tmp_path):
    """A response's head tells no reuse."""
    events, heads = [b'data: {"type": "response.created"}\n\n', b'data: {"type": "response.completed"}\n\n'], []

    async def engine(scope, receive, send):
        await receive()
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            heads.append(len(reports))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    pod, reports = Pod(tmp_path, engine), []

    async def report(request_id, *, timeout_ms):
        reports.append(request_id)

    pod.sidecar.load_report = report
    answer = await pod.post("/v1/responses", {"input": "hi", "stream": True}, pod.identity(kept=GROUP))

    assert (answer.body, answer.complete) == (b"".join(events), True)
    assert heads == [0, 0]
    assert len(reports) == 1
    assert pod.counted("kept_requests", verdict="unknown", reason="") == 1


async def test_an_error_of_the_engine_has_no_receipt(pod):
    pod.engine.max_model_len = 1
    answer = await ask(pod, "/v1/completions", prompt="too long for it")
    assert answer.status >= 400
    assert "x-context-cache" not in answer.headers


def _without_echo(answer):
    """What vLLM answers too, and the toy engine repeats: where the KV is, for another engine."""
    return {key: value for key, value in answer.json.items() if key != "kv_transfer_params"}


class _nothing:  # noqa: N801  # reads as a word where it is used
    def __enter__(self):
        return None

    def __exit__(self, *exc):
        return False
