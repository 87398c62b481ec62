"""Plain requests of keys that opted in: one conversation, one pod and one group; nobody else's are touched."""

import json
from dataclasses import replace

import msgspec
import pytest

from contextcache.beginning import first_messages
from contextcache.claim import TURN_PATHS
from contextcache.errors import InvalidRequest
from contextcache.identity import IDENTITY_HEADER, TENANT_HEADER
from gateway.kept import LABEL_HEADERS, Plain
from gateway.paths import Kind
from gateway.settings import GatewaySettings
from gateway.tenants.keys import Caller
from tests.kit.gateway_parts import SECRET
from tests.kit.identities import verify_identity


def settings(tmp_path, **fields):
    (tmp_path / "secret").write_bytes(SECRET)
    return GatewaySettings(endpoints=[{"name": "a", "url": "http://a:1"}], secret_file=tmp_path / "secret", **fields)


CHAT = "/v1/chat/completions"
HEAD = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Write a parser."}]


def says(parts, plain, tenant="keeper"):
    parts.gateway.parts.keys.caller_of = lambda headers: Caller(tenant, None, plain)


async def route(parts, body, *, path=CHAT, **headers):
    head = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    kind = parts.gateway.kind_of("POST", path)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with parts.gateway.admitted(kind, head, path=path, request_id="req_1") as admission:
        assert await parts.gateway.route_by_head(admission, has_body=True) is None
        return await parts.gateway.route(admission, raw)


def group(parts, forward):
    token = forward.set_headers.get(IDENTITY_HEADER)
    return token and verify_identity(token, SECRET, now_ms=parts.clock.now_ms()).kept


async def chat(parts, *messages, **headers):
    return await route(parts, {"model": "stub-model", "messages": [*HEAD, *messages]}, **headers)


@pytest.mark.parametrize("path", sorted(TURN_PATHS))
async def test_a_key_that_keeps_has_a_group_signed_and_its_bytes_untouched_and_no_store_is_asked(parts, path):
    says(parts, Plain.KEEP)
    forward = await route(parts, {"model": "stub-model", "prompt": "x", "messages": HEAD, "input": "x"}, path=path)
    assert forward.kind is Kind.STATELESS
    assert forward.body is None
    assert group(parts, forward).startswith("kept_")
    assert parts.directory.calls == []


@pytest.mark.parametrize(
    ("plain", "headers"), [(Plain.OFF, {}), (Plain.ROUTE, {}), (Plain.KEEP, {"x_context_keep": "off"})]
)
async def test_nothing_is_signed_for_a_key_or_a_request_that_does_not_keep(parts, plain, headers):
    says(parts, plain)
    forward = await chat(parts, **headers)
    assert (forward.set_headers.keys(), forward.body) == ({TENANT_HEADER}, None)


async def test_a_deployment_may_allow_less_than_a_key_says(parts):
    says(parts, Plain.KEEP)
    parts.set(plain_max="route")
    assert (await chat(parts)).set_headers.keys() == {TENANT_HEADER}


async def test_other_calls_of_a_key_that_keeps_are_as_before(parts):
    says(parts, Plain.KEEP)
    forward = await route(parts, {"input": "x"}, path="/v1/embeddings")
    assert forward.set_headers.keys() == {TENANT_HEADER}


@pytest.mark.parametrize("label", LABEL_HEADERS)
async def test_a_label_decides_the_group_whatever_is_said(parts, label):
    says(parts, Plain.KEEP)
    names = {label.replace("-", "_"): "conversation-1"}
    one = group(parts, await chat(parts, **names))
    later = group(
        parts, await route(parts, {"model": "stub-model", "messages": [{"role": "user", "content": "?"}]}, **names)
    )
    another = group(parts, await chat(parts, **{next(iter(names)): "conversation-2"}))
    says(parts, Plain.KEEP, tenant="somebody")
    theirs = group(parts, await chat(parts, **names))
    assert one == later
    assert len({one, another, theirs}) == 3


async def test_codex_names_its_conversation_in_the_body(parts):
    says(parts, Plain.KEEP)
    named = {"model": "stub-model", "prompt_cache_key": "thread-1"}
    one = await route(parts, named | {"input": "a"}, path="/v1/responses")
    two = await route(parts, named | {"input": "b"}, path="/v1/responses")
    assert group(parts, one) == group(parts, two)


async def test_an_operator_s_own_label_comes_before_those_of_known_clients(parts):
    says(parts, Plain.KEEP)
    parts.set(label_headers=("x-thread",))
    both = [await chat(parts, x_thread="t1", x_session_id=number) for number in ("s1", "s2")]
    other = await chat(parts, x_thread="t2", x_session_id="s1")
    assert len({group(parts, forward) for forward in both}) == 1
    assert group(parts, both[0]) != group(parts, other)


async def test_without_a_label_what_comes_up_to_the_first_words_of_the_user_decides(parts):
    says(parts, Plain.KEEP)
    marked = [HEAD[0], HEAD[1] | {"cache_control": {"type": "ephemeral"}}]
    same = [
        await chat(parts),
        await chat(parts, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "Go on."}),
        await route(parts, {"model": "stub-model", "messages": marked}),
    ]
    other = [
        await route(
            parts, {"model": "stub-model", "messages": [HEAD[0], {"role": "user", "content": "Write a lexer."}]}
        ),
        await route(parts, {"model": "another", "messages": HEAD}),
        await route(
            parts, {"model": "stub-model", "system": "You are a poet.", "messages": HEAD[1:]}, path="/v1/messages"
        ),
        await route(parts, {"model": "stub-model", "messages": HEAD[1:]}, path="/v1/messages"),
    ]
    assert len({group(parts, forward) for forward in same}) == 1
    assert len({group(parts, forward) for forward in (same[0], *other)}) == 5


async def test_one_conversation_goes_to_one_pod_and_many_to_both(parts):
    for plain in (Plain.ROUTE, Plain.KEEP):
        says(parts, plain)
        pods = [
            {(await chat(parts, x_session_id=f"s{number}")).endpoint.name for _ in range(3)} for number in range(20)
        ]
        assert all(len(names) == 1 for names in pods)
        assert len(set.union(*pods)) == 2


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no json",
        b"[1]",
        b'{"messages": 5}',
        b'{"messages": [',
        b'{"messages": "x", "messages": []}',
        b'{"input": {}}',
    ],
)
async def test_what_is_no_conversation_is_the_engine_s_to_judge(parts, raw):
    says(parts, Plain.KEEP)
    assert (await route(parts, raw)).body is None


async def test_a_body_as_wide_and_deep_as_may_be_is_read_no_further_than_its_first_words(parts):
    says(parts, Plain.KEEP)
    wide = json.dumps({"model": "m", "messages": [{"role": "tool", "content": "x"}] * 31_000}).encode()
    deep = b'{"model": "m", "messages": [{"role": "user", "x": ' + b"[" * 90 + b"]" * 90 + b"}]}"
    for raw in (wide, deep):
        assert group(parts, await route(parts, raw)).startswith("kept_")


async def test_what_a_client_says_to_the_engine_behind_our_back_is_gone(parts):
    says(parts, Plain.KEEP)
    forward = await chat(parts)
    told = {"model": "stub-model", "messages": HEAD, "cache_salt": "mine", "kv_transfer_params": {"context_cache": "x"}}
    changed = await route(parts, told)
    assert forward.body is None
    assert json.loads(changed.body) == told | {"cache_salt": None, "kv_transfer_params": None}


@pytest.mark.parametrize("depth", [60, 94])
async def test_a_message_nested_as_deep_as_a_body_may_be_has_a_group(parts, depth):
    says(parts, Plain.KEEP)
    part = b'{"text": ' + b"[" * depth + b"]" * depth + b"}"
    deep = b'{"model": "m", "messages": [{"role": "user", "content": [%b]}]}' % part
    assert group(parts, await route(parts, deep)).startswith("kept_")


def test_messages_too_deep_to_be_told_are_taken_as_they_are_spelled():
    """Seen failing: a message of 600 levels was answered with 500."""
    spelled = b'[{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]"
    assert first_messages(msgspec.Raw(spelled))


async def test_a_conversation_whose_pod_refuses_it_has_its_kv_fetched_from_that_pod_s_sidecar(parts):
    """Seen failing: who was asked next knew of nobody that has the newest turn, and computed it all."""
    says(parts, Plain.KEEP)
    first = await chat(parts)
    parts.gateway.sent(first)
    for name in ("pod-a", "pod-b"):
        parts.endpoints.note_sidecar(name, fingerprint="f", tiers={"disk": 0.5})
    again = await chat(parts)
    parts.gateway.sent(again)
    moved = await parts.gateway.reroute(again, unreachable=again.endpoint.name)

    def identity(forward):
        return verify_identity(forward.set_headers[IDENTITY_HEADER], SECRET, now_ms=parts.clock.now_ms())

    assert again.endpoint.name == first.endpoint.name != moved.endpoint.name
    assert (identity(again).prefix_at, identity(moved).prefix_at) == ("", again.endpoint.sidecar)
    assert replace(identity(moved), prefix_at="") == identity(again)


async def test_no_context_is_called_what_kept_conversations_are(parts):
    says(parts, Plain.KEEP)
    named = {"model": "stub-model", "prompt": "x", "session_id": "kept_" + "1" * 32, "context_create": "if_missing"}
    with pytest.raises(InvalidRequest):
        await route(parts, named, path="/v1/completions")
    with pytest.raises(InvalidRequest):
        await parts.directory.add("kept_1")
