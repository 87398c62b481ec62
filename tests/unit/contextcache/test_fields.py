"""Misspelt fields of ours are refused by name; no field of any API that reaches the engine is."""

import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextcache import fields
from contextcache.claim import RESPONSES_PATH, read_claims, read_strict_claims
from contextcache.errors import InvalidRequest
from contextcache.fields import (
    FOREIGN_FIELDS,
    NAMES_MAX,
    OUR_FIELDS,
    meant_by,
    nearest,
    refuse_misspelt,
    refuse_unknown,
)
from contextcache.responses import RESPONSE_FIELDS, continued_by

ALL_OURS = OUR_FIELDS | RESPONSE_FIELDS
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("sesion_id", "session_id"), ("session_ID", "session_id"), ("sessionId", "session_id"),
        ("session", "session_id"), ("sesssion_id", "session_id"), ("sessoin_id", "session_id"),
        ("context_id", "session_id"), ("tll", "ttl"), ("tl", "ttl"), ("TTL", "ttl"), ("ttl_s", "ttl"),
        ("ttl_seconds", "ttl"), ("ttl_polcy", "ttl_policy"), ("contextmode", "context_mode"),
        ("context-mode", "context_mode"), ("context_comit", "context_commit"), ("context_creat", "context_create"),
        ("meta_data", "metadata"), ("metdata", "metadata"), ("mod", "mode"), ("truncaton", "truncation"),
        ("previous_responseid", "previous_response_id"), ("conversation_id", "conversation"), ("stroe", "store"),
    ],
)  # fmt: skip
def test_a_misspelt_field_of_ours_is_refused_and_the_right_one_named(name, meant):
    with pytest.raises(InvalidRequest, match=f"unknown field `{name}`: did you mean `{meant}`") as caught:
        refuse_misspelt(["model", "prompt", name], ALL_OURS)

    assert caught.value.param == name


@pytest.mark.parametrize(
    "name",
    ["temperature", "models", "transforms", "provider", "route", "user_id", "chat_id", "litellm_metadata_x", "t", "",
     "stop", "tools", "tool", "top_k", "guided_json", "é" * 3, "context_length_exceeded_behavior", "x" * 70],
)  # fmt: skip
def test_a_name_that_is_far_from_ours_passes(name):
    refuse_misspelt([name], ALL_OURS)


def test_no_field_of_openai_or_anthropic_is_refused():
    from anthropic.types import message_create_params as messages
    from anthropic.types.beta import message_create_params as beta
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    kinds = (
        messages.MessageCreateParamsBase,
        beta.MessageCreateParamsBase,
        completions.CompletionCreateParamsBase,
        chat.CompletionCreateParamsBase,
        responses.ResponseCreateParamsBase,
    )
    names = {name for kind in kinds for name in typing.get_type_hints(kind, include_extras=True)}

    assert len(names) > 60
    refuse_misspelt(names - {"max_tokens"}, ALL_OURS)  # in parts, as a body of more names than some is not checked
    for name in names:
        refuse_misspelt([name], ALL_OURS)


def test_a_foreign_field_is_exempt_only_because_it_is_near():
    assert {nearest(name, ALL_OURS) for name in FOREIGN_FIELDS} == {"mode"}


def test_a_body_of_more_names_than_a_request_has_costs_no_comparison():
    refuse_misspelt([f"x{number}" for number in range(NAMES_MAX)] + ["sesion_id"], ALL_OURS)
    with pytest.raises(InvalidRequest):
        refuse_misspelt([f"x{number}" for number in range(NAMES_MAX - 1)] + ["sesion_id"], ALL_OURS)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("spelled", ['"sesion_id"', '"ses\\u0069on_id"', '"contextmode"', '"context_id"'])
@pytest.mark.parametrize("rest", ['"prompt": "x"', '"prompt": NaN', '"prompt": "\\ud83d"'])
def test_a_plain_request_whose_handle_is_misspelt_is_no_plain_request(path, spelled, rest):
    """Seen to fail: 200 without the context. As the engine reads it too: NaN, and halves of characters."""
    claims = read_claims(f'{{{rest}, {spelled}: "chat-42"}}'.encode())

    with pytest.raises(InvalidRequest, match="did you mean"):
        continued_by(path, claims, None)


def test_what_only_a_create_means_passes_in_a_plain_request():
    for name in ("tll", "meta_data", "mod"):
        assert continued_by(COMPLETIONS, read_strict_claims(json.dumps({name: 1}).encode()), None) is None


def test_fields_of_a_response_are_ours_on_its_path_alone():
    claims = read_strict_claims(b'{"conversation_id": "talk", "input": "x"}')

    assert continued_by(COMPLETIONS, claims, None) is None
    with pytest.raises(InvalidRequest, match="did you mean `conversation`"):
        continued_by(RESPONSES_PATH, claims, None)


def test_a_body_of_too_many_keys_is_read_without_their_names():
    body = {f"k{number}": 0 for number in range(30_000)} | {"sesion_id": "a", "model": "m"}
    claims = read_strict_claims(json.dumps(body).encode())

    assert (claims.names, claims.model()) == (frozenset(), "m")


@pytest.mark.parametrize("name", [b"\\ud83d", b"\xff"])
def test_a_name_that_is_no_text_hides_no_other_field(name):
    claims = read_claims(b'{"%b": 1, "model": "m", "prompt": "x"}' % name)

    assert claims.model() == "m"


@given(st.text(max_size=12), st.text(max_size=12))
def test_being_near_does_not_depend_on_the_side(one, other):
    if len(one) >= 8 and len(other) >= 8:
        assert (nearest(one, [other]) is None) == (nearest(other, [one]) is None)
    assert nearest(one, [one]) in {one, None}


def test_names_that_are_longer_than_any_are_not_remembered():
    """Seen to fail: four thousand names of a megabyte each would stay in memory."""
    remembered = fields._meant_by.cache_info().currsize
    for letter in "abc":
        refuse_misspelt([letter * 1_000_000], ALL_OURS)
        with pytest.raises(InvalidRequest) as caught:
            refuse_unknown([letter * 1_000_000], frozenset({"ttl"}))
        assert len(caught.value.message) < 200

    assert fields._meant_by.cache_info().currsize == remembered


def test_what_is_allowed_is_said_where_nothing_is_near():
    with pytest.raises(InvalidRequest, match="unknown field `color`: allowed: metadata, ttl"):
        refuse_unknown({"color": 1}, frozenset({"ttl", "metadata"}))
    with pytest.raises(InvalidRequest, match=r"unknown query parameter `limt`: did you mean `limit`\?"):
        refuse_unknown(["limt"], frozenset({"limit"}), kind="query parameter")
    assert meant_by("x" * 10_000, ALL_OURS) is None
