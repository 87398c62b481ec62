"""A pod has two addresses: its turn process gets what concerns turns, vLLM the other requests, on both fronts."""

from __future__ import annotations

import pytest

from contextcache.identity import DESTINATION_HEADER, IDENTITY_HEADER, UNROUTED_HEADER
from gateway.pods.endpoints import WatchedEndpoints
from tests.kit.fronts import only_envoy, until_answered
from tests.kit.stub_engine import StubEngine

PLAIN = {"model": "stub-model", "prompt": "x"}
LARGE = {"model": "stub-model", "prompt": "x" * (64 << 10)}


@pytest.fixture
async def turn():
    """The turn process of `pod-a`, whose vLLM is `engine`."""
    turn = StubEngine(runs_turns=True)
    await turn.start()
    yield turn
    await turn.stop()


@pytest.fixture
async def front(open_front, engine, turn, manager):
    async with open_front({"pod-a": engine}, turns={"pod-a": turn}, manager_port=manager.port) as front:
        yield front


def address_of(stub) -> str:
    return f"127.0.0.1:{stub.port}"


async def asked(front, path, body, **headers) -> int:
    async with front.post(path, body, headers=headers) as answer:
        await answer.read()
        return answer.status


async def never_probed(_self) -> None:
    """Leave the gateway with what it knows."""


async def test_requests_of_contexts_and_large_bodies_reach_the_turn_process_and_the_others_vllm(
    front, engine, turn, manager
):
    """Seen failing with `is_direct` always true and always false, and without `engines` in Envoy's cluster."""
    await manager.add("ctx_1")
    statuses = [
        await asked(front, "/v1/completions", PLAIN),
        await asked(front, "/v1/completions", LARGE),
        await asked(front, "/v1/context", PLAIN),
        await asked(front, "/v1/completions", {**PLAIN, "session_id": "ctx_1"}),
        await asked(front, "/v1/completions", PLAIN, **{"X-Session-ID": "ctx_1"}),
        await asked(front, "/v1/audio/transcriptions", b"--x--", **{"content-type": "multipart/form-data; boundary=x"}),
        await asked(front, "/tokenize", PLAIN),
    ]

    assert statuses == [200] * 7
    assert [found.target for found in engine.turns] == ["/v1/completions", "/tokenize"]
    assert {found.header(DESTINATION_HEADER)[0] for found in engine.turns} == {address_of(engine)}
    assert all(found.header(IDENTITY_HEADER) == found.header(UNROUTED_HEADER) == [] for found in engine.turns)
    assert [bool(found.header(IDENTITY_HEADER)) for found in turn.turns] == [False, True, True, True, False]
    assert {found.header(DESTINATION_HEADER)[0] for found in turn.turns} == {address_of(turn)}


async def test_with_a_limit_of_requests_everything_reaches_the_turn_process_that_counts(
    open_front, engine, turn, manager
):
    """Seen failing without `tenants.limits` in the rule."""
    opened = open_front({"pod-a": engine}, turns={"pod-a": turn}, manager_port=manager.port, tenant_in_flight_max=50)
    async with opened as front:
        assert await asked(front, "/v1/completions", PLAIN) == 200

    assert (len(turn.turns), engine.turns) == (1, [])


async def test_a_pod_that_has_only_one_of_its_addresses_takes_no_request(front, engine, turn):
    """Seen failing with a probe of the turn process alone, and of vLLM alone."""
    await engine.stop()
    await until_answered(lambda: front.post("/v1/context", PLAIN), 503)
    num_before = len(turn.turns)
    assert await asked(front, "/v1/context", PLAIN) == 503
    assert len(turn.turns) == num_before
    await engine.start()
    await until_answered(lambda: front.post("/v1/context", PLAIN), 200)
    await turn.stop()
    await until_answered(lambda: front.post("/v1/completions", PLAIN), 503)
    num_before = len(engine.turns)

    assert await asked(front, "/v1/completions", PLAIN) == 503
    assert len(engine.turns) == num_before


async def test_a_plain_request_survives_a_vllm_that_has_just_gone(
    open_front, engine, turn, other, manager, monkeypatch
):
    """Seen failing without a retry in the carrier, and in Envoy's routes."""
    other_turn = StubEngine(runs_turns=True)
    await other_turn.start()
    pods, turns = {"pod-a": engine, "pod-b": other}, {"pod-a": turn, "pod-b": other_turn}
    async with open_front(pods, turns=turns, manager_port=manager.port) as front:
        monkeypatch.setattr(WatchedEndpoints, "probe_all", never_probed)
        await engine.stop()
        statuses = [await asked(front, "/v1/completions", PLAIN) for _ in range(4)]
        await engine.start()
    await other_turn.stop()

    assert statuses == [200] * 4


@only_envoy
async def test_without_a_gateway_requests_reach_the_turn_process_alone(front, engine, turn):
    """Seen failing with a plain least-request policy in the place of the subset."""
    await front.end_gateway()
    statuses = [await asked(front, "/v1/completions", PLAIN) for _ in range(8)]

    assert statuses == [200] * 8
    assert len(turn.turns) == 8
    assert {found.header(UNROUTED_HEADER)[0] for found in turn.turns} == {"1"}
    assert engine.turns == []
