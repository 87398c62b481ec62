"""Which requests reach vLLM directly, and which the turn process of its pod."""

import json

import pytest

from contextcache.errors import NoReadyEndpoint
from contextcache.identity import tenant_tag
from contextcache.requests import QUEUED_BYTES
from gateway.kept import Plain
from gateway.pods.endpoints import Health
from gateway.pods.state import Endpoint, EngineLoad
from gateway.tenants.keys import Caller
from tests.kit.gateway_parts import KEY, SECRET

MODELS = frozenset({"stub-model"})
JSON = "application/json"
PLAIN = {"model": "stub-model", "prompt": "x"}


def admitted(parts, path="/v1/completions", *, content_type=JSON, method="POST", **more):
    head = {"authorization": f"Bearer {KEY}", "content-type": content_type}
    kind = parts.gateway.kind_of(method, path)
    with parts.gateway.admitted(kind, head, path=path, request_id="req_1", **more) as admission:
        return admission


async def route(parts, body=PLAIN, path="/v1/completions", **more):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await parts.gateway.route(admitted(parts, path, **more), raw)


async def report(parts, **health):
    for name in ("pod-a", "pod-b"):
        parts.probe.health[name] = Health(True, models=MODELS, **health)
    await parts.endpoints.probe_all()


async def test_a_plain_request_goes_to_vllm_and_what_has_an_identity_to_the_turn_process(two_addresses):
    """Seen failing with the identity left out of the rule."""
    parts = two_addresses
    await parts.directory.add("ctx_1", holder="pod-b")
    plain, turn = await route(parts), await route(parts, {"prompt": "x", "session_id": "ctx_1"})
    create, tokens = await route(parts, path="/v1/context"), await route(parts, path="/tokenize")
    parts.gateway.parts.keys.caller_of = lambda headers: Caller("demo", plain=Plain.KEEP)
    kept = await route(parts)

    assert [one.is_direct for one in (plain, tokens)] == [True] * 2
    assert [one.is_direct for one in (turn, create, kept)] == [False] * 3
    assert (plain.address, plain.url) == (plain.endpoint.address, plain.endpoint.url)
    assert (turn.address, turn.url) == ("pod-b:8010", "http://pod-b:8010")
    assert list(turn.routing_headers.values()) == ["pod-b:8010"]


async def test_a_pod_without_a_turn_process_gets_no_request_of_a_context(parts):
    """Seen failing: vLLM alone ignored `session_id` and answered without the history."""
    await parts.directory.add("ctx_1", holder="pod-b")
    await report(parts, runs_turns=False)
    plain = await route(parts)

    assert plain.endpoint.name in ("pod-a", "pod-b")
    for path, body in (("/v1/completions", {"prompt": "x", "session_id": "ctx_1"}), ("/v1/context", PLAIN)):
        with pytest.raises(NoReadyEndpoint):
            await route(parts, body, path)


async def test_where_the_turn_runs_in_vllm_there_is_one_address(parts):
    forward = await route(parts)

    assert (forward.is_direct, forward.url) == (False, forward.endpoint.url)


async def test_a_large_or_unread_body_goes_to_the_turn_process(two_addresses):
    """Seen failing with `<=`, with an unread body as one of 0 bytes, and for the head alone."""
    parts, short = two_addresses, len(json.dumps(PLAIN))
    sizes = [await route(parts, {**PLAIN, "prompt": "x" * (QUEUED_BYTES - short + more)}) for more in (0, 1)]
    file = admitted(parts, "/v1/audio/transcriptions", content_type="multipart/form-data; boundary=x")
    unread = await parts.gateway.route_by_head(file, has_body=True)
    listed = await parts.gateway.route_by_head(admitted(parts, "/v1/models", method="GET"), has_body=False)

    assert [one.is_direct for one in sizes] == [True, False]
    assert (unread.is_direct, listed.is_direct) == (False, True)


@pytest.mark.parametrize("more", [{"only_turn": True}, {"subset": frozenset({"pod-b:8010"}), "only_turn": True}])
async def test_a_proxy_that_lists_turn_processes_only_gets_no_other_address(two_addresses, more):
    """Seen failing without `only_turn` in the rule, and with a subset of vLLM's addresses."""
    forward = await route(two_addresses, **more)

    assert not forward.is_direct
    assert forward.endpoint.name == "pod-b" or "subset" not in more


async def test_while_a_limit_counts_requests_all_pass_the_turn_process(two_addresses):
    """Seen failing with either limit left out."""
    parts = two_addresses
    await report(parts, limits_tenants=True)
    in_pod = await route(parts)
    await report(parts)
    free = await route(parts)
    parts.tenants.limits = (50, 0)
    in_gateway = await route(parts)

    assert [one.is_direct for one in (in_pod, free, in_gateway)] == [False, True, False]


async def test_requests_of_a_full_pod_pass_the_turn_process_that_counts_them_for_their_tenants(two_addresses):
    """Seen failing without `has_room` in the rule: a flood of plain requests was counted for no tenant."""
    parts = two_addresses
    await report(parts, load=EngineLoad(running=8, waiting=9, kv_usage=0.5))
    full = await route(parts)
    await report(parts, load=EngineLoad(running=8, waiting=0, kv_usage=0.5))
    idle = await route(parts)

    assert [one.is_direct for one in (full, idle)] == [False, True]


async def test_a_draining_pod_refuses_through_its_turn_process(two_addresses):
    """vLLM answers 500 while it shuts down. Seen failing without `draining` in the rule."""
    parts = two_addresses
    pod = parts.endpoints.endpoint("pod-a")
    parts.endpoints.follow([Endpoint(pod.name, pod.url, pod.sidecar, draining=True, turn_url=pod.turn_url)])

    assert not (await route(parts)).is_direct


async def test_after_a_refused_connection_the_rule_holds_for_the_next_pod(two_addresses):
    parts = two_addresses
    first = await route(parts)
    second = await parts.gateway.reroute(first, unreachable=first.endpoint.name)

    assert second.endpoint.name != first.endpoint.name
    assert second.is_direct
    assert [state.ready for state in parts.endpoints.states()].count(True) == 1


async def test_a_pods_report_lacks_the_requests_that_went_to_vllm(two_addresses):
    """Seen failing with direct requests counted as carried: they hid two of another gateway."""
    parts, tag = two_addresses, tenant_tag("demo", SECRET)
    with parts.endpoints.carrying("pod-a", tag, is_direct=True), parts.endpoints.carrying("pod-a", tag):
        parts.probe.health["pod-a"] = Health(True, models=MODELS, tenants={tag: 3})
        await parts.endpoints.probe_all()

        # Two of the three are another gateway's, or went through Envoy.
        assert parts.endpoints.num_reported(tag) == 2
