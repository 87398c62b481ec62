"""A conversation that another one's agent started: it goes to its parent's pod and may start from its parent's KV."""

import json

import pytest

from contextcache.claim import TURN_PATHS
from contextcache.identity import IDENTITY_HEADER
from gateway.kept import LABEL_HEADERS, PARENT_HEADERS, Plain, parent_of
from gateway.pods.endpoints import EngineLoad, Health
from gateway.tenants.keys import Caller
from tests.kit.gateway_parts import PREVIOUS_REF, REF, SECRET
from tests.kit.identities import verify_identity

CREATE = "/v1/context"
SYSTEM = [{"role": "system", "content": "You are a sub-agent."}, {"role": "user", "content": "Find the bug."}]
SATURATED = Health(healthy=True, models=frozenset({"stub-model"}), load=EngineLoad(8, 40, 0.5))


async def route(parts, path=CREATE, body=None, tenant="demo", plain=Plain.OFF, **headers):
    """Route a request of a new conversation. `headers`: with `_` for `-`."""
    parts.gateway.parts.keys.caller_of = lambda headers: Caller(tenant, None, plain)
    head = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    kind = parts.gateway.kind_of("POST", path)
    whole = {"model": "stub-model", "messages": SYSTEM, "input": "x", "prompt": "x"} if body is None else body
    with parts.gateway.admitted(kind, head, path=path, request_id="req_1") as admission:
        return await parts.gateway.route(admission, json.dumps(whole).encode())


def identity(parts, forward):
    return verify_identity(forward.set_headers[IDENTITY_HEADER], SECRET, now_ms=parts.clock.now_ms())


def child_body(path):
    """Return a body that creates a context on a path."""
    named = {"session_id": "child", "context_create": "if_missing"} if path != CREATE else {"session_id": "child"}
    return {"model": "stub-model", "messages": SYSTEM, "input": "x", **named}


@pytest.mark.parametrize(
    ("headers", "parent"),
    [
        ({}, ""),
        ({"x-dynamo-parent-session-id": "p", "x-dynamo-session-id": "c"}, "p"),
        ({"x-parent-session-id": "p", "x-session-id": "c"}, "p"),
        ({"x-codex-parent-thread-id": "p", "session-id": "s"}, "p"),
        ({"x-claude-code-session-id": "s"}, ""),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, "s"),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "p"}, "p"),
        (
            {"x-claude-code-session-id": "s", "x-claude-code-parent-agent-id": "a", "x-dynamo-parent-session-id": "p"},
            "p",
        ),
    ],
)
def test_the_parent_is_that_of_each_client_s_headers(headers, parent):
    assert parent_of(headers) == parent


def test_no_header_names_both_a_conversation_and_its_parent():
    assert not set(PARENT_HEADERS) & set(LABEL_HEADERS)


@pytest.mark.parametrize("pod", ["pod-a", "pod-b"])
@pytest.mark.parametrize("path", [CREATE, *sorted(TURN_PATHS)])
async def test_a_new_context_goes_to_its_parent_s_pod_with_the_names_of_its_kv(parts, path, pod):
    """Found by reading: without the holder in the query, all went to the pod of their beginning."""
    await parts.directory.add("parent", holder=pod)
    forward = await route(parts, path, child_body(path), x_parent_session_id="parent")

    signed = identity(parts, forward)
    assert (forward.endpoint.name, forward.choice.is_placed, forward.choice.prefix_at) == (pod, True, "")
    assert (signed.session_id, signed.parent, signed.parent_refs) in [
        ("child", "parent", (REF,)), (None, "parent", (REF,)),
    ]  # fmt: skip


async def test_a_context_that_exists_has_its_own_kv_alone(parts):
    await parts.directory.add("parent", holder="pod-a", cache_ref=PREVIOUS_REF)
    await parts.directory.add("child", holder="pod-b")
    forward = await route(
        parts,
        "/v1/completions",
        {"model": "stub-model", "prompt": "x", "session_id": "child"},
        x_parent_session_id="parent",
    )

    assert forward.endpoint.name == "pod-b"
    assert (identity(parts, forward).parent, identity(parts, forward).parent_refs) == ("", ())


async def test_a_busy_parent_s_pod_lends_its_kv_to_another(parts):
    parts.endpoints.note_sidecar("pod-a", fingerprint="f", tiers={"disk": 0.5})
    parts.endpoints.note_sidecar("pod-b", fingerprint="f", tiers={"disk": 0.5})
    await parts.directory.add("parent", holder="pod-a")
    parts.probe.health["pod-a"] = SATURATED
    await parts.endpoints.probe_all()
    forward = await route(parts, body=child_body(CREATE), x_parent_session_id="parent")

    assert (forward.endpoint.name, forward.choice.prefix_at) == ("pod-b", "pod-a")
    signed = identity(parts, forward)
    assert (signed.prefix_at, signed.parent, signed.parent_refs) == ("pod-a", "parent", ())
    assert parts.sidecars["pod-b"].pulls == []  # the child needs only what both begin with


async def test_a_parent_whose_pod_is_gone_leaves_the_choice_to_the_beginning(parts):
    plain = await route(parts, body=child_body(CREATE))
    await parts.directory.add("parent", holder="pod-z")
    forward = await route(parts, body=child_body(CREATE), x_parent_session_id="parent")

    assert (forward.endpoint.name, forward.choice.reason) == (plain.endpoint.name, plain.choice.reason)


@pytest.mark.parametrize("name", ["nowhere", "", "a/b", "p, q", "kept_0", "x" * 200, "ctx_" + "0" * 32, "é"])
async def test_a_parent_that_is_not_there_is_as_good_as_none(parts, name):
    plain = await route(parts, body=child_body(CREATE))
    forward = await route(parts, body=child_body(CREATE), x_parent_session_id=name)

    assert forward.endpoint == plain.endpoint
    assert (identity(parts, forward).parent, identity(parts, forward).parent_refs) == ("", ())


async def test_another_tenant_s_context_is_no_parent_and_costs_the_same_work(parts):
    """Seen failing: a look-up under the tenant `demo` signed the other tenant's names."""
    await parts.directory.add("parent", holder="pod-a")
    calls = []
    signed = []
    for name in ("parent", "nowhere"):
        before = len(parts.directory.calls)
        forward = await route(parts, body=child_body(CREATE), tenant="other", x_parent_session_id=name)
        calls.append(parts.directory.calls[before:])
        signed.append((identity(parts, forward), forward.endpoint))

    assert calls == [["locate"], ["locate"]]
    assert signed[0] == signed[1]


async def test_an_expired_parent_and_a_store_that_is_away_refuse_nothing(parts):
    await parts.directory.add("parent", holder="pod-a", ttl_s=60)
    parts.clock.advance(s=61)
    await parts.endpoints.probe_all()
    expired = await route(parts, body=child_body(CREATE), x_parent_session_id="parent")
    parts.directory.down = True
    away = await route(parts, body=child_body(CREATE), x_parent_session_id="parent")

    assert [identity(parts, forward).parent for forward in (expired, away)] == ["", ""]


async def test_a_plain_sub_agent_goes_where_its_parent_s_last_request_went(parts):
    """Seen failing: its own label was unknown, so the hash ring chose its pod."""
    pods = []
    for number in range(12):
        parent = await route(
            parts, "/v1/messages", plain=Plain.KEEP, x_claude_code_session_id=f"s{number}", body={"model": "stub-model"}
        )
        parts.gateway.sent(parent)
        child = await route(
            parts,
            "/v1/messages",
            plain=Plain.KEEP,
            x_claude_code_session_id=f"s{number}",
            x_claude_code_agent_id=f"a{number}",
        )
        pods.append((parent.endpoint.name, child.endpoint.name))
        assert identity(parts, parent).kept != identity(parts, child).kept

    assert all(parent == child for parent, child in pods)
    assert len(set(pods)) == 2
