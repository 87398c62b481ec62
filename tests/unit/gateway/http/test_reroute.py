"""A request whose pod takes no connection goes to another, or waits for the last one; all of it ends."""

import httpx
import pytest

from contextcache.identity import IDENTITY_HEADER
from gateway.http.app import HttpFront
from gateway.http.carrier import ConnectFailed, ConnectTimedOut
from gateway.tenants.limits import FrontLimits
from tests.kit.gateway_parts import KEY, SECRET
from tests.kit.identities import verify_identity


class LateCarrier:
    """Each pod takes a connection when its faults are used up."""

    def __init__(self, **faults):
        self.faults = faults
        self.asked = []
        self.told = []

    async def carry(self, forward, body, exchange):
        name = forward.endpoint.name.replace("-", "_")
        self.asked.append(name)
        self.told.append(verify_identity(forward.set_headers[IDENTITY_HEADER], SECRET, now_ms=0))
        if self.faults.get(name):
            raise self.faults[name].pop(0)("it did not")
        await exchange.start(200, [])
        await exchange.send({"type": "http.response.body", "body": name.encode()})


@pytest.fixture
def answer_of(parts):
    async def answer_of(carrier, path="/v1/completions", **body):
        await parts.endpoints.probe_all()
        front = HttpFront(parts.with_parts(limits=FrontLimits(max_body_bytes=10_000)), carrier=carrier)
        await parts.directory.add("ctx_1", holder="pod-a")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://gateway") as client:
            headers = {"authorization": f"Bearer {KEY}"}
            return await client.post(path, json=body or {"session_id": "ctx_1"}, headers=headers)

    return answer_of


@pytest.mark.parametrize("fault", [ConnectFailed, ConnectTimedOut])
async def test_another_pod_takes_what_the_holder_does_not(answer_of, parts, fault):
    carrier = LateCarrier(pod_a=[fault])
    answer = await answer_of(carrier)

    assert (answer.status_code, carrier.asked) == (200, ["pod_a", "pod_b"])
    assert [(state.ready, state.placed) for state in parts.endpoints.states()] == [(False, 0), (True, 1)]


async def test_a_pod_that_took_no_connection_is_not_asked_for_what_it_never_got(answer_of, parts):
    """Seen failing: the next pod was told to fetch the beginning from the one that had refused."""
    for name in ("pod-a", "pod-b"):
        parts.endpoints.note_sidecar(name, fingerprint="f", tiers={"disk": 0.5})
    both_once = LateCarrier(pod_a=[ConnectTimedOut], pod_b=[ConnectTimedOut])
    answer = await answer_of(both_once, "/v1/context", prompt="x" * 2000)

    assert (answer.status_code, len(both_once.asked)) == (200, 3)
    assert [told.prefix_at for told in both_once.told] == ["", "", ""]
    assert sum(state.placed for state in parts.endpoints.states()) == 1


async def test_the_last_pod_is_asked_again_when_it_was_only_late(answer_of, parts):
    """Seen to fail: 503, and 503 for everybody else until the next probe."""
    carrier = LateCarrier(pod_a=[ConnectFailed], pod_b=[ConnectTimedOut, ConnectTimedOut])
    answer = await answer_of(carrier)

    assert (answer.status_code, carrier.asked) == (200, ["pod_a", "pod_b", "pod_b", "pod_b"])
    assert [state.endpoint.name for state in parts.endpoints.states() if state.ready] == ["pod-b"]


async def test_a_pod_that_takes_no_connection_is_given_up_after_three_waits(answer_of):
    carrier = LateCarrier(pod_a=[ConnectFailed], pod_b=[ConnectTimedOut] * 9)
    answer = await answer_of(carrier)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_ready_endpoint")
    assert answer.headers["retry-after"] == "1"
    assert carrier.asked == ["pod_a", *["pod_b"] * 3]
