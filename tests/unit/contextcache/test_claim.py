"""What a body claims is what the engine's parser would see, however spelled; what is wrong is said with its place."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contextcache import claim
from contextcache.claim import (
    CONTAINERS_MAX,
    DEPTH_MAX,
    OTHER_VALUES_MAX,
    RESPONSES_PATH,
    STRINGS_MAX,
    VALUES_MAX,
    claimed_session,
    is_opaque,
    read_claims,
    read_object,
    read_strict_claims,
    refuse_session,
)
from contextcache.errors import InvalidRequest, PreviousResponseNotFound
from contextcache.input_items import ITEMS_MAX
from contextcache.requests import LARGE_BYTES
from contextcache.responses import Continued, continued_by, response_id
from contextcache.terms import read_session_id
from tests.kit.hostile_bodies import SHAPES, hostile_body
from tests.kit.process_memory import memory_bytes

EP_CREATE = b"""{
     "model": "facebook-opt-125m",
     "prompt": "Say this is a test",
     "ttl": 3600,
   }"""
EP_ASK = b"""{
     "session_id": "session-01"
     "model": "facebook-opt-125m",
     "prompt": "Say this is a test",
   }"""
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"]


def claims(body: dict):
    return read_claims(json.dumps(body).encode())


def told(body: bytes) -> dict | None:
    """What the engine gets to see of `body`, or None when it goes through untouched."""
    read = read_claims(body)
    changed = None if read is None else read.changed()
    return None if changed is None else {key: value for key, value in json.loads(changed).items() if value is not None}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (EP_CREATE, "line 4, column 17: extra comma before '}'"),
        (EP_ASK, "line 2, column 32: missing comma"),
        (b'{"a": [1, 2,]}', "line 1, column 12: extra comma before ']'"),
        ('{"é": "éé" "b"}'.encode(), "line 1, column 11: missing comma"),
        (b"", "the body is empty"),
        (b"  \n", "the body is empty"),
        (b'{"a": ', "line 1, column 7"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "Infinity is not a JSON number"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"a": ' + b"[" * 20_000, "nested too deeply"),
        (b'{"a": "\x01"}', "line 1, column 8"),
        (b'{"a": 1} x', "line 1, column 11"),
    ],
)
@pytest.mark.parametrize("read", [read_object, read_strict_claims])
def test_what_is_wrong_and_where_is_said(read, body, message):
    with pytest.raises(InvalidRequest) as caught:
        read(body)

    assert message in caught.value.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a": ' + b"1" * 5000 + b"}", "too many digits"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\\ud800"}', "an incomplete character"),
        (b'{"\\ud800": 1}', "an incomplete character"),
        (b'{"messages": [{"role": "user", "content": "\\udc00"}]}', "surrogate pair"),
        (b'{"messages": [{"role": "user", "tool_calls": [{"id": "\\ud800"}]}]}', "surrogate pair"),
        (b'{"a": ' + b"[" * DEPTH_MAX + b"1" + b"]" * DEPTH_MAX + b"}", "nested too deeply"),
        (b'{"a": ' + b'{"a": ' * 900 + b"1" + b"}" * 901, "nested too deeply"),
        (b'{"a": [' + b"[]," * CONTAINERS_MAX + b"[]]}", "lists and objects"),
        (b'{"a": [' + b'"",' * STRINGS_MAX + b'""]}', "keys and strings"),
        (b'{"a": [' + rb'"\\",' * STRINGS_MAX + b'""]}', "keys and strings"),
        (b"{" + b'"a":0,' * STRINGS_MAX + b'"a":0}', "keys and strings"),
        (b'{"a": [' + b"1," * VALUES_MAX + b"1,1]}", "values"),
        (b'{"a": [' + b"[]," * 2_000_001 + b"[]]}", "opening brackets"),
    ],
)
def test_what_is_built_is_bounded_in_depth_and_width(body, message):
    with pytest.raises(InvalidRequest) as caught:
        read_object(body)

    assert message in caught.value.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a": ' + b"[" * DEPTH_MAX + b"1" + b"]" * DEPTH_MAX + b"}", "nested too deeply"),
        (b'{"a": [' + b"[]," * CONTAINERS_MAX + b"[]]}", "lists and objects"),
        (b"[" + b"[]," * CONTAINERS_MAX + b"[]]", "lists and objects"),
        (b'{"a": [' + b'"",' * STRINGS_MAX + b'""]}', "keys and strings"),
        (b"{" + b'"a":0,' * 500_000 + b'"a":0}', "keys and strings"),
        (b'\xef\xbb\xbf {"a":NaN,' + b'"a":0,' * 500_000 + b'"a":0}', "keys and strings"),
        (b'{"a": [' + b"1," * OTHER_VALUES_MAX + b"1,1]}", "besides token ids"),
        (b'{"prompt": [' + b"1," * VALUES_MAX + b"1,1]}", "values"),
    ],
)
@pytest.mark.parametrize("read", [read_object, read_claims, read_strict_claims])
def test_what_the_engine_builds_is_bounded_too(read, body, message):
    """Seen failing before, with `read_claims`: a body without a context had no bound, and made others wait."""
    if read is not read_claims and body.startswith((b"[", b"\xef")):
        message = ""  # no object, or no JSON: that is said first, or this
    with pytest.raises(InvalidRequest) as caught:
        read(body)

    assert message in caught.value.message


CHAT, MESSAGES, EMBEDDINGS = "/v1/chat/completions", "/v1/messages", "/v1/embeddings"
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [0] * 1000}, "messages"),
        (CHAT, {"messages": [{}] * 1000}, "messages"),
        (CHAT, {"messages": [USER, {"role": 1}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [0] * 1000}]}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [0] * 1000}]}, "messages"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [0]}]}]}, "messages"),
        ("/v1/chat/completions/batch", {"messages": [[USER], [{}]]}, "messages"),
        ("/tokenize", {"messages": [{}]}, "messages"),
        (EMBEDDINGS, {"messages": [{}]}, "messages"),
        (RESPONSES_PATH, {"input": [0] * 1000}, "input[0]"),
        (RESPONSES_PATH, {"input": [{}] * 1000}, "input[0]"),
        (RESPONSES_PATH, {"input": [{"type": "message", "content": [0]}]}, "input[0]"),
        (RESPONSES_PATH, {"input": [{"type": "function_call_output", "output": [0]}]}, "input[0]"),
        (RESPONSES_PATH, {"input": [USER, {"type": "function_call", "name": "f"}]}, "input[1]"),
        (RESPONSES_PATH, {"input": [{"type": "message", "role": "user"}] * 1000}, "input[0]"),
        (RESPONSES_PATH, {"input": [{"type": "zz", "role": "user", "content": "x"}] * 1000}, "input[0]"),
        (RESPONSES_PATH, {"input": [{"type": "message", "role": "user", "content": "x", "phase": 1}] * 1000}, "input"),
        (RESPONSES_PATH, {"input": [USER] * (ITEMS_MAX + 1)}, "input"),
        (CHAT, {"messages": [USER], "stop": [0] * (OTHER_VALUES_MAX + 1)}, None),
        (CHAT, {"messages": [USER], "prompt": [{"a": 0}] * 100 + [0] * OTHER_VALUES_MAX}, None),
    ],
)
def test_what_the_engine_would_try_as_every_type_that_it_knows_is_refused(path, body, param):
    """Seen with vLLM 0.32: 1 000 empty items of an input took it 9.6 s, two million numbers as messages 121 s."""
    raw = json.dumps({"model": "m"} | body).encode()
    for read in (read_claims, read_strict_claims):
        with pytest.raises(InvalidRequest) as caught:
            read(raw, path)

        assert caught.value.param == param
        assert len(caught.value.message) < 100


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [100_000] * 200_000}),
        ("/v1/completions", {"prompt": [[100_000] * 2000] * 100}),
        (EMBEDDINGS, {"input": [[100_000] * 8192] * 100}),
        ("/detokenize", {"tokens": [100_000] * 200_000}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a, [b"}]}] * 10_000}),
        (
            CHAT,
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}], "tools": None},
        ),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, "x"]}]}),
        ("/v1/chat/completions/batch", {"messages": [[USER], [USER, USER]]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"text": "x"}]}]}]}),
        (
            RESPONSES_PATH,
            {"input": [USER, {"type": "function_call_output", "output": "x"}, {"type": "reasoning", "summary": []}]},
        ),
        (RESPONSES_PATH, {"input": "x" * 1000}),
        (CHAT, {"messages": "x", "logit_bias": {str(token): 1 for token in range(1000)}}),
    ],
)
def test_what_clients_send_passes(path, body):
    raw = json.dumps({"model": "m"} | body).encode()

    assert read_claims(raw, path) is not None
    assert read_strict_claims(raw, path).model() == "m"
    assert read_object(raw)["model"] == "m"


def test_half_of_a_character_in_a_message_hides_no_message():
    raw = b'{"messages": [{"role": "user", "content": "\\ud800"}, %s]}'

    assert read_claims(raw % b'{"role": "user"}', CHAT) is not None
    with pytest.raises(InvalidRequest):
        read_claims(raw % b"0", CHAT)


def test_half_of_a_character_in_an_item_hides_no_item():
    half = b'{"role": "user", "content": "\\ud800"}'

    assert read_claims(b'{"input": [%s]}' % b",".join([half] * ITEMS_MAX), RESPONSES_PATH) is not None
    with pytest.raises(InvalidRequest, match=r"input\[1\] lacks `content`"):
        read_claims(b'{"input": [%s, {"role": "user"}]}' % half, RESPONSES_PATH)


def test_other_encodings_and_bodies_that_are_no_json_are_judged_alike():
    wide = json.dumps({"a": [[]] * (CONTAINERS_MAX + 1)})
    binary = bytes(range(256)) * (1 << 12)

    for encoding in ("utf-8-sig", "utf-16", "utf-32-le"):
        with pytest.raises(InvalidRequest, match="lists and objects"):
            read_claims(wide.encode(encoding), CHAT)
    assert read_claims(binary, "/v1/audio/x") is None


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(['"', "\\", "[", "]", ",", "a", "{"]), max_size=60).map("".join), st.integers(1, 9))
def test_the_structure_of_a_body_is_the_same_whatever_the_pieces_it_is_read_in(text, piece_bytes):
    body = json.dumps([text, [text], {"k": text}]).encode()
    whole = claim._structure(body)
    before, claim.LARGE_BYTES = claim.LARGE_BYTES, piece_bytes
    try:
        assert claim._structure(body) == whole == b"[,[],{}]"
    finally:
        claim.LARGE_BYTES = before


@pytest.mark.parametrize(
    "body",
    [
        {"é": [1, None, "é", 5.0, 12345678901234567890123]},
        {"prompt": list(range(130_000))},
        {"prompt": '[{"a": "b\\"c"}, ' * 60_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "[[\\"}]}] * 9_000},
        {"a": json.loads("[" * (DEPTH_MAX - 1) + "]" * (DEPTH_MAX - 1)), "prompt": [0] * 30_000},
    ],
    ids=["small", "ids", "text", "messages", "deep"],
)
def test_a_proper_body_is_its_object(body):
    assert read_object(json.dumps(body).encode()) == body


@pytest.mark.parametrize("start", [b'{"session_id":"ctx_a",', b"{"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_body_built_to_be_slow_is_told_or_read(shape, start):
    body = hostile_body(shape, 3 << 20, start=start)

    for read in (read_claims, read_strict_claims, read_object):
        with suppress(InvalidRequest):
            assert read(body) is not None


TEXTS = st.text(max_size=5) | st.sampled_from(["session_id", "\ud800", "prompt", "NaN", "cache_salt", "{", '"}', "\\"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
FORBIDDEN = ("cache_salt", "kv_transfer_params", "ec_transfer_params")
KEYS = TEXTS | st.sampled_from(["session_id", "model", "prompt", "vllm_xargs", *FORBIDDEN])
MEMBERS = st.lists(st.tuples(KEYS, VALUES), max_size=5)


@st.composite
def spelled(draw) -> bytes:
    """An object as some client may spell it: keys that repeat, escapes, NaN, any encoding."""
    ascii_only = draw(st.booleans())

    def write(value) -> str:
        return json.dumps(value, ensure_ascii=ascii_only)

    members = [(write(key), write(value)) for key, value in draw(MEMBERS)]
    if draw(st.booleans()):
        members = [(key.replace("_", "\\u005f"), value) for key, value in members]
    space = draw(st.sampled_from(["", " ", "\n\t "]))
    text = space + "{" + space + f",{space}".join(f"{key}:{value}" for key, value in members) + space + "}" + space
    return text.encode(draw(st.sampled_from(ENCODINGS)), "surrogatepass")


@settings(max_examples=400, deadline=None)
@given(spelled())
@example(b'{"vllm_xargs":{"a":NaN,"cache_salt":"x"}}')
@example(b'{"session\\ud05fid": 1}')
@example(b'\xef\xbb\xbf{"vllm_xargs":{"\\ud800\\udc00": null, "cache_salt": null}}')
@example(b'{"vllm_xargs":{"\xed\xa0\x80": null, "cache_salt": null}}')
@example(b'{"\\ud800": 1, "session_id": null}')
def test_what_is_seen_is_what_the_engine_would_see(body):
    """The reference is Python's own parser, which the engine has."""
    seen = json.loads(body)
    try:
        read = read_claims(body)
    except InvalidRequest:
        assert '"session_id"' in json.dumps(seen) or b'"session_id"' in body
        return
    named, model = seen.get("session_id"), seen.get("model")

    if named is None:
        refuse_session(read)
    else:
        with pytest.raises(InvalidRequest):
            refuse_session(read)
    if isinstance(model, str) and model.isascii() and "NaN" not in model:
        assert read.model() == model
    changed = read.changed(salt="ab12")
    left = json.loads(changed)
    extra = left.pop("vllm_xargs", None)
    assert left.pop("cache_salt") == "ab12"
    assert left.pop("kv_transfer_params", None) is None
    assert left.pop("ec_transfer_params", None) is None
    for key in ("vllm_xargs", *FORBIDDEN):
        given_extra = seen.pop(key, None)
        if key == "vllm_xargs" and isinstance(given_extra, dict):
            assert set(extra) == set(given_extra) - set(FORBIDDEN)
    assert json.dumps(left) == json.dumps(seen)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","cache_salt":"x"}',
        b'{"model":"m","kv_transfer_params":{"context_cache":"v1.a.b"}}',
        b'{"model":"m","ec_transfer_params":{"ec_items":[{"peer_host":"10.0.0.1"}]}}',
        b'{"model":"m","cache\\u005fsalt":"x"}',
        b'{"model":"m","\\u0063ache_salt":"x","\\u006bv_transfer_params":{}}',
        b'{"cache_salt":"a","model":"m","cache_salt":"b"}',
        b'\xef\xbb\xbf{"model":"m","cache_salt":"x"}',
        *('{"model":"m","cache_salt":"x", "kv_transfer_params":{}} '.encode(encoding) for encoding in ENCODINGS),
    ],
)
def test_forbidden_keys_do_not_count_however_they_are_spelled(body):
    assert told(body) == {"model": "m"}


def test_forbidden_keys_beside_nan_do_not_count_either():
    body = b'{"temperature": NaN, "cache_salt": "x"}'

    assert read_claims(body).changed() == b'{"temperature": NaN, "cache_salt": "x","cache_salt":null}'


def test_the_way_round_by_extra_arguments_is_closed():
    assert told(b'{"vllm_xargs": {"kv_transfer_params": "x", "mine": 1.50}}') == {"vllm_xargs": {"mine": 1.5}}
    assert told(b'{"vllm_xargs": {"cache\\u005fsalt": "x"}, "n": 1}') == {"vllm_xargs": {}, "n": 1}
    assert told(b'{"vllm_xargs": {"ec_transfer_params": {"peer_host": "x"}}}') == {"vllm_xargs": {}}
    assert told(b'{"vllm_xargs": {"cache_salt": "x", "\xed\xa0\x80": 1}}') == {"vllm_xargs": {"\ud800": 1}}
    with pytest.raises(InvalidRequest, match="at most 65536 bytes"):
        told(b'{"vllm_xargs": {"cache_salt": "x", "mine": "' + b"x" * 70_000 + b'"}}')


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":"cache_salt and kv_transfer_params"}',
        b'{"model":"m","prompt":"the \\"cache_salt\\" key"}',
        b'{"model":"m", "prompt":"caf\\u00e9"}',
        b'{"model":"m","nested":{"cache_salt":"not at the top"}}',
        b'{"vllm_xargs": {"mine": 1}}',
        b'{"vllm_xargs": ["cache_salt"]}',
        b'["cache_salt"]',
        b'not json with "cache_salt"',
        b'{"cache_salt": "unfinished',
        b"\x00\x01\x02 binary",
        b"",
    ],
)
def test_everything_else_stays_as_it_is(body):
    assert told(body) is None


@pytest.mark.parametrize(
    "body", [b'{"session_id":"ctx_1",}', b'{"session_id":"a" "b"}', b'{"temperature": NaN, "session_id": "a"}']
)
def test_an_invalid_body_that_names_a_session_is_refused(body):
    with pytest.raises(InvalidRequest):
        read_claims(body)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16-le", "utf-32"])
def test_a_session_named_in_another_encoding_is_refused_rather_than_lost(encoding):
    with pytest.raises(InvalidRequest):
        read_claims('{"session_id":"ctx_1"}'.encode(encoding))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16-le", "utf-32"])
def test_a_large_body_in_another_encoding_is_refused_rather_than_held_three_times(encoding):
    small, large = (json.dumps({"prompt": "x" * size}).encode(encoding) for size in (10, LARGE_BYTES))

    assert read_claims(small) is not None
    with pytest.raises(InvalidRequest):
        read_claims(large)


@pytest.mark.parametrize("shift", range(-8, 8))
def test_nan_is_read_wherever_it_lies_in_a_large_body(shift):
    """A large body is looked through piece by piece."""
    before = b'{"prompt": "'
    body = before + b"x" * (LARGE_BYTES + shift - len(before) - 15) + b'", "a": Infinity, "cache_salt": "x"}'

    assert read_claims(body).changed() == body[:-1] + b',"cache_salt":null}'


def test_a_body_is_held_twice_at_most_while_it_is_read_as_the_engine_reads_it():
    body = b'{"prompt": [' + b"NaN," + b"1234567," * 2_000_000 + b'0], "x": "' + b"y" * 32_000 + b'\\ud800"}'
    before = memory_bytes("self", "VmRSS")
    Path("/proc/self/clear_refs").write_text("5")

    assert read_claims(body).model() is None
    assert memory_bytes("self", "VmHWM") - before < 1.5 * len(body)


def test_the_bytes_before_the_salt_are_those_that_came():
    body = b'{ "prompt":"caf\\u00e9", "n":1.0 }\n'

    assert read_claims(body).changed(salt="ab") == b'{ "prompt":"caf\\u00e9", "n":1.0 ,"cache_salt":"ab"}\n'
    assert read_claims(b"{ }").changed(salt="ab") == b'{ "cache_salt":"ab"}'
    assert read_claims(b'{"a":{}}').changed(salt="ab") == b'{"a":{},"cache_salt":"ab"}'


def test_an_upload_is_not_looked_into():
    assert is_opaque("multipart/form-data; boundary=x")
    assert not is_opaque("application/json, multipart/form-data")


def test_a_model_is_read_only_where_there_is_one():
    assert claims({"model": "m"}).model() == "m"
    assert claims({"model": 7}).model() is None
    assert claims({}).model() is None
    assert claims({"model": "m" * 10_000}).model() is None


def test_the_body_claims_any_id_and_the_header_those_that_we_mint():
    assert claimed_session(claims({"session_id": "s"}), None) == "s"
    assert claimed_session(claims({}), "ctx_1") == claimed_session(None, "ctx_1") == "ctx_1"
    assert claimed_session(None, None) is None
    assert claimed_session(claims({"session_id": None}), None) is None


def test_a_label_claims_nothing_and_contradicts_nothing():
    for label in ("agent-run-7", "s", "my agent, run 7", "a:b", "xctx_1", "", "CTX_1", "\u00a0ctx_1"):
        assert claimed_session(claims({}), label) is None
        assert claimed_session(claims({"session_id": "s"}), label) == "s"


def test_body_and_header_must_not_name_different_contexts():
    assert claimed_session(claims({"session_id": "ctx_1"}), "ctx_1") == "ctx_1"
    for header in ("ctx_2", "ctx_1, ctx_2", "label, ctx_2"):
        with pytest.raises(InvalidRequest):
            claimed_session(claims({"session_id": "ctx_1"}), header)


def test_a_header_that_is_repeated_names_its_context_all_the_same():
    assert claimed_session(None, "ctx_1, ctx_1") == claimed_session(claims({}), "ctx_1,ctx_1,label") == "ctx_1"
    assert claimed_session(claims({"session_id": "ctx_1"}), "ctx_1, ctx_1") == "ctx_1"
    with pytest.raises(InvalidRequest):
        claimed_session(None, "ctx_1, ctx_2")


@pytest.mark.parametrize("named", ["", "a:b", "{x}", "a" * 129, "../x", 5, ["s"], "s\n", ".hidden", "x" * 10_000])
def test_an_id_that_cannot_be_one_is_refused_in_the_body(named):
    with pytest.raises(InvalidRequest) as caught:
        claimed_session(claims({"session_id": named}), None)

    assert caught.value.param == "session_id"


@pytest.mark.parametrize("named", ["ctx_1", 5, "", {}])
def test_a_call_that_cannot_carry_a_context_refuses_one(named):
    with pytest.raises(InvalidRequest) as caught:
        refuse_session(claims({"session_id": named}))

    assert caught.value.param == "session_id"


def test_a_response_that_the_engine_keeps_is_nobodys_to_name():
    """Its store knows no tenants, and clients may choose the ids in it."""
    for said in ("resp_1", "resp_0123abc", "resp_01_mine", "resp_1_../etc", "resp_1_"):
        with pytest.raises(PreviousResponseNotFound, match=r"^Previous response with id '.*' not found"):
            continued_by(RESPONSES_PATH, claims({"previous_response_id": said}), None)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, None),
        ({"store": None, "conversation": None, "previous_response_id": None}, None),
        ({"store": False}, None),
        ({"store": True}, Continued(None, creates=True)),
        ({"conversation": "a"}, Continued("a", creates=True)),
        ({"conversation": {"id": "a"}, "store": True}, Continued("a", creates=True)),
        ({"conversation": "a", "store": False}, Continued("a", commits=False)),
        ({"previous_response_id": "resp_12_a_b"}, Continued("a_b", 12)),
        ({"previous_response_id": "resp_12_a_b", "store": False}, Continued("a_b", 12, commits=False)),
        ({"session_id": "a"}, Continued("a")),
        ({"session_id": "a", "context_create": "if_missing"}, Continued("a", creates=True)),
        ({"session_id": "a", "conversation": "a"}, Continued("a", creates=True)),
    ],
)
def test_a_response_says_its_context_in_openais_words(said, expected):
    assert continued_by(RESPONSES_PATH, claims(said), None) == expected
    in_other_calls = None if "session_id" not in said else Continued("a", creates="context_create" in said)
    assert continued_by("/v1/chat/completions", claims(said), None) == in_other_calls


def test_what_a_response_goes_on_from_is_short_or_refused():
    for key in ("previous_response_id", "conversation", "store"):
        with pytest.raises(InvalidRequest) as caught:
            continued_by(RESPONSES_PATH, claims({key: "x" * 5000}), None)
        assert caught.value.param == key


def test_the_last_of_two_keys_is_the_one_that_counts():
    assert claimed_session(read_claims(b'{"session_id":"a","session\\u005fid":"b"}'), None) == "b"
    assert claimed_session(read_claims(b'{"session_id":"a","session_id":null}'), None) is None


@pytest.mark.parametrize(
    "name", ["_", "-", "_V1StGXR8_Z5jdHi6B-myT", "-x", "--help", "__proto__", "a.b", "_..", "x" * 128]
)
def test_a_context_may_have_any_name_that_the_documentation_allows(name):
    """Seen to fail: a first `_` or `-` was refused, as one nanoid in 32 has it."""
    body = claims({"session_id": name})

    assert body.session_id() == read_session_id(name) == name
    assert continued_by(RESPONSES_PATH, claims({"conversation": name}), None).session_id == name
    previous = claims({"previous_response_id": response_id(name, 3)})
    assert continued_by(RESPONSES_PATH, previous, None) == Continued(name, 3)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "a%2fb", "ä", "_\n", "x" * 129])
def test_a_name_that_cannot_stand_in_a_path_is_refused_with_the_rule(name):
    for read in (lambda: claims({"session_id": name}).session_id(), lambda: read_session_id(name)):
        with pytest.raises(InvalidRequest, match="and must not begin with"):
            read()


@pytest.mark.parametrize(
    ("items", "found"),
    [
        (b'[{"type": "comp\\u0061ction", "encrypted_content": "a"}, {"role": "user", "content": "?"}]', "a"),
        (b'[{"type": "compaction", "encrypted_content": "a"}, {"type": "compaction", "encrypted_content": "b"}]', "b"),
        (b'[{"role": "user", "content": "compaction"}]', None),
        (b'"compaction"', None),
    ],
)
@pytest.mark.parametrize("read", [read_claims, read_strict_claims])
def test_the_last_compaction_of_a_response_s_input_is_found_as_the_engine_would_read_it(read, items, found):
    """Seen failing: a search for the plain word missed an escaped one."""
    body = b'{"model": "m", "input": %b}' % items

    assert read(body, "/v1/responses").compaction == found
    assert read(body, "/v1/chat/completions").compaction is None
