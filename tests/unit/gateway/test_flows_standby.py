"""The pod that stands by for an answer is signed with the identity."""

import json

from contextcache.identity import IDENTITY_HEADER, Standby
from gateway.kept import Plain
from gateway.tenants.keys import Caller
from tests.kit.gateway_parts import KEY, SECRET
from tests.kit.identities import verify_identity


async def route(parts, body, path="/v1/completions"):
    head = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    kind = parts.gateway.kind_of("POST", path)
    with parts.gateway.admitted(kind, head, path=path, request_id="req_1") as admission:
        return await parts.gateway.route(admission, json.dumps(body).encode())


def identity_of(parts, forward):
    return verify_identity(forward.set_headers[IDENTITY_HEADER], SECRET, now_ms=parts.clock.now_ms())


async def test_an_identity_names_the_pod_that_continues_the_answer(two_addresses):
    """Seen failing without `standby` in the identity."""
    parts = two_addresses
    await parts.directory.add("ctx_1", holder="pod-b")
    turn, create = (
        await route(parts, {"prompt": "x", "session_id": "ctx_1"}),
        await route(parts, {"model": "stub-model", "prompt": "x"}, path="/v1/context"),
    )
    other = {"pod-a": "pod-b", "pod-b": "pod-a"}[create.endpoint.name]

    assert identity_of(parts, turn).standby == Standby("pod-a", "http://pod-a:8001", "pod-a", "pod-b")
    assert identity_of(parts, create).standby.name == other


async def test_a_kept_request_has_a_standby_too(two_addresses):
    """Seen failing: only turns had one."""
    parts = two_addresses
    parts.gateway.parts.keys.caller_of = lambda headers: Caller("demo", plain=Plain.KEEP)
    kept = await route(parts, {"model": "stub-model", "prompt": "x"})
    other = {"pod-a": "pod-b", "pod-b": "pod-a"}[kept.endpoint.name]

    assert identity_of(parts, kept).kept
    assert identity_of(parts, kept).standby.name == other


async def test_after_a_refused_connection_the_refusing_pod_does_not_stand_by(two_addresses):
    parts = two_addresses
    await parts.directory.add("ctx_1", holder="pod-b")
    turn = await route(parts, {"prompt": "x", "session_id": "ctx_1"})
    again = await parts.gateway.reroute(turn, unreachable="pod-b")

    assert (again.endpoint.name, identity_of(parts, again).standby) == ("pod-a", None)
