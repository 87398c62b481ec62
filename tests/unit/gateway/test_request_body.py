"""Forbidden keys and session claims are found however they are spelled; all else stays bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextcache.errors import InvalidRequest
from gateway.request_body import model_of, needs_parsing, parse_leniently, with_cache_salt, without_forbidden_keys

JSON = "application/json"


def stripped(body: bytes) -> dict | None:
    """What the pod gets of `body`, or None when it goes through untouched."""
    parsed = parse_leniently(body) if needs_parsing(body, JSON) else None
    changed = None if parsed is None else without_forbidden_keys(parsed)
    return None if changed is None else json.loads(changed)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","cache_salt":"x"}',
        b'{"model":"m","kv_transfer_params":{"context_cache":"v1.a.b"}}',
        b'{"model":"m","cache\\u005fsalt":"x"}',
        b'{"model":"m","\\u0063ache_salt":"x","\\u006bv_transfer_params":{}}',
        b'{"cache_salt":"a","model":"m","cache_salt":"b"}',
        b'\xef\xbb\xbf{"model":"m","cache_salt":"x"}',
        '{"model":"m","cache_salt":"x"}'.encode("utf-16"),
        '{"model":"m","cache_salt":"x"}'.encode("utf-16-le"),
        '{"model":"m","kv_transfer_params":{}}'.encode("utf-32-be"),
    ],
)
def test_forbidden_keys_are_removed_however_they_are_spelled(body):
    assert stripped(body) == {"model": "m"}


def test_forbidden_keys_in_nan_and_friends_are_removed_as_the_engine_would_read_them():
    changed = without_forbidden_keys(parse_leniently(b'{"temperature": NaN, "cache_salt": "x"}'))

    assert changed == b'{"temperature": NaN}'


def test_the_way_round_by_extra_arguments_is_closed():
    body = b'{"vllm_xargs": {"kv_transfer_params": "x", "mine": 1}}'

    assert stripped(body) == {"vllm_xargs": {"mine": 1}}


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":"cache_salt and kv_transfer_params"}',
        b'{"model":"m","prompt":"the \\"cache_salt\\" key"}',
        b'{"model":"m", "prompt":"caf\\u00e9"}',
        b'{"model":"m","nested":{"cache_salt":"not at the top"}}',
        b'["cache_salt"]',
        b'not json with "cache_salt"',
        b'{"cache_salt": "unfinished',
        b"\x00\x01\x02 binary",
        b"",
    ],
)
def test_everything_else_stays_as_it_is(body):
    assert stripped(body) is None


def test_plain_bodies_and_uploads_are_not_even_parsed():
    assert not needs_parsing(b'{"model":"m","prompt":"hello"}', JSON)
    assert not needs_parsing(b'--x\r\n"cache_salt" \x00', "multipart/form-data; boundary=x")
    assert needs_parsing(b'{"cache_salt":1}', "application/json, multipart/form-data")


@pytest.mark.parametrize(
    "body", [b'{"session_id":"ctx_1",}', b'{"session_id":"a" "b"}', b'{"temperature": NaN, "session_id": "a"}']
)
def test_an_invalid_body_that_names_a_session_is_refused(body):
    with pytest.raises(InvalidRequest):
        parse_leniently(body)


def test_a_session_named_in_another_encoding_is_refused_rather_than_lost():
    with pytest.raises(InvalidRequest):
        parse_leniently('{"session_id":"ctx_1"}'.encode("utf-16-le"))


def test_a_body_nested_beyond_the_parser_is_refused():
    with pytest.raises(InvalidRequest, match="deep"):
        parse_leniently(b'{"cache_salt":' + b"[" * 100_000)


def test_numbers_and_text_survive_a_rewrite():
    body = {"a": 1.0, "b": 12345678901234567890, "c": "é\u2028\U0001f600", "d": [1, 2], "cache_salt": "x"}

    assert stripped(json.dumps(body).encode()) == {key: body[key] for key in "abcd"}


def test_the_model_is_read_only_where_there_is_one():
    assert model_of({"model": "m"}) == "m"
    assert model_of({"model": 7}) is None
    assert model_of(None) is None


OBJECTS = st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5) | st.just({"a": []}))


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"]


@given(OBJECTS, st.sampled_from(ENCODINGS), st.sampled_from(["", "\n "]), st.sampled_from([None, 2]))
def test_a_salt_is_added_to_an_object_however_it_is_spelled_and_nothing_else_changes(sent, encoding, lead, indent):
    """Seen to fail with a body in UTF-16 spliced as if it were ASCII."""
    body = (lead + json.dumps(sent, indent=indent)).encode(encoding)

    assert json.loads(with_cache_salt(body, "ab12")) == {"cache_salt": "ab12", **sent}


def test_the_bytes_behind_the_salt_are_those_that_came():
    assert (
        with_cache_salt(b'{ "prompt":"caf\\u00e9", "n":1.0}', "ab")
        == b'{ "cache_salt":"ab","prompt":"caf\\u00e9", "n":1.0}'
    )
    assert with_cache_salt(b"{ }", "ab") == b'{ "cache_salt":"ab"}'


@pytest.mark.parametrize("body", [b"", b"[1]", b'"x"', b"x{", b"\0{", b"{\0"])
def test_what_is_no_object_gets_no_salt(body):
    assert with_cache_salt(body, "ab") is None
