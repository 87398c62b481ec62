"""Requests are read strictly: what a context cannot do is refused by name."""

import pytest

from contextcache.errors import InvalidRequest, TtlOutOfRange
from vllm_plugin.turn.prompt.request import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    CONTEXT_PATH,
    ClientPrompt,
    read_new_session,
    read_turn,
)


def read(path=COMPLETIONS_PATH, headers=None, **body):
    return read_turn(path, {"model": "m", **body}, headers or {})


def test_a_prompt_makes_a_completion_and_messages_make_a_chat():
    message = {"role": "user", "content": "hi"}

    assert read(CONTEXT_PATH, prompt="hi").path == COMPLETIONS_PATH
    assert read(CONTEXT_PATH, messages=[message]).path == CHAT_PATH


def test_our_fields_and_forbidden_ones_never_reach_the_engine():
    request = read(
        prompt="hi",
        session_id="s",
        context_mode="append",
        truncation={"type": "rolling_tokens", "tokens": 9.0},
        cache_salt="x",
        kv_transfer_params={},
        temperature=0,
    )

    assert dict(request.engine_fields) == {"model": "m", "temperature": 0}


def test_a_list_with_one_prompt_is_that_prompt():
    assert read(prompt=["hi"]).prompt == ClientPrompt(text="hi")
    assert read(prompt=[[1, 2]]).prompt == ClientPrompt(token_ids=(1, 2))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 2**32]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "context_mode": "both"}, "context_mode"),
        ({"prompt": "a", "context_commit": "yes"}, "context_commit"),
        ({"prompt": "a", "truncation": "auto"}, "truncation"),
        ({"prompt": "a", "truncation": {"type": "rolling_tokens"}}, "truncation"),
        ({"prompt": "a", "truncation": {"type": "auto", "tokens": 5}}, "truncation"),
        ({"prompt": "a", "truncation": {"type": [], "tokens": 5}}, "truncation"),
        ({"prompt": "a", "truncation": {"type": "rolling_tokens", "tokens": 0}}, "truncation"),
        ({"prompt": "a", "truncation": {"type": "rolling_tokens", "tokens": True}}, "truncation"),
        ({"prompt": "a", "truncation": {"type": "rolling_tokens", "tokens": 5, "by": 1}}, "truncation"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "stream_options": 5}, "stream_options"),
        ({"prompt": "a", "model": ""}, "model"),
        ({"prompt": "a", "model": None}, "model"),
    ],
)
def test_what_a_context_cannot_do_is_refused_with_the_field_named(body, param):
    with pytest.raises(InvalidRequest) as caught:
        read(**body)

    assert caught.value.param == param


IMAGE = {"image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/context"])
@pytest.mark.parametrize("role", ["user", "tool", "assistant", "system"])
@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", **IMAGE}],
        [{"type": "text", "text": "What is this?"}, {"type": "image_url", **IMAGE}],
        [IMAGE],
        [{"text": "What is this?", **IMAGE}],
        [{"type": None, "text": "What is this?", **IMAGE}],
        [{"type": "text", "text": "What is this?", "uuid": "one", **IMAGE}],
        [{"type": "text", "text": "What is this?", "uuid": "one"}],
        [{"type": "input_image", "image_url": "https://example.com/a.png"}],
        [{"type": "image_embeds", "image_embeds": "AA=="}],
        [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}],
        [{"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}],
        [{"type": "text", "text": {"image_url": "a"}}],
        ["What is this?"],
        {"type": "image_url", **IMAGE},
        5,
    ],
    ids=str,
)
def test_what_is_no_text_in_messages_is_refused(path, role, content):
    """Seen to fail with an image in a part without a type, and in one of type `text` with a `uuid`: vLLM sees both."""
    with pytest.raises(InvalidRequest) as caught:
        read(path, messages=[{"role": "user", "content": "Hi"}, {"role": role, "content": content}])

    assert caught.value.param == "messages[1].content"


@pytest.mark.parametrize(
    "content", [None, "", "Hi", [], [{"type": "text", "text": "Hi", "cache_control": {}}]], ids=str
)
def test_text_in_messages_is_taken_in_every_form(content):
    assert read(CHAT_PATH, messages=[{"role": "user", "content": content}]).prompt.messages


@pytest.mark.parametrize("ttl", ["x", 1.5, True, None, [], {}])
def test_a_ttl_that_is_no_whole_number_is_refused(ttl):
    with pytest.raises(InvalidRequest) as caught:
        read_new_session({"ttl": ttl}, tenant="t", model="m")

    assert caught.value.param == "ttl"
    assert not isinstance(caught.value, TtlOutOfRange)


def test_a_whole_number_may_be_written_with_a_point():
    assert read_new_session({"ttl": 60.0}, tenant="t", model="m").ttl_s == 60
    assert read(prompt=[1, 2.0]).prompt == ClientPrompt(token_ids=(1, 2))


@pytest.mark.parametrize("prompt", [[1, 2.5], [1, True], [1, None], [-1.0], [float(2**32)]])
def test_token_ids_are_whole_numbers_in_range(prompt):
    with pytest.raises(InvalidRequest) as caught:
        read(prompt=prompt)

    assert caught.value.param == "prompt"


@pytest.mark.parametrize("ttl", [0, -1, 2**53 + 1, 10**30])
def test_a_ttl_that_can_never_be_one_is_out_of_range(ttl):
    with pytest.raises(TtlOutOfRange):
        read_new_session({"ttl": ttl}, tenant="t", model="m")


def test_a_new_session_has_the_documented_defaults():
    new = read_new_session({}, tenant="t", model="m")

    assert new.session_id.startswith("ctx_")
    assert (new.ttl_s, new.mode.value, new.ttl_policy.value) == (3600, "session", "fixed")


@pytest.mark.parametrize(
    ("header", "generation"),
    [("3", 3), ('"3"', 3), (' "3" ', 3), ('W/"3"', 3), ("*", None), (" * ", None), (None, None)],
)
def test_if_match_is_a_generation_or_any(header, generation):
    """Seen to fail: 400 for `*` and for a weak tag, which HTTP has too."""
    headers = {} if header is None else {"if-match": header}

    assert read(prompt="a", headers=headers).expected_generation == generation


@pytest.mark.parametrize(
    "header", ["", "W/3", 'w/"3"', '"3', '3"', '""', '"3", "4"', "-1", "3.0", "1" * 16, "**", "\u0663"]
)
def test_another_if_match_is_refused_with_what_it_may_be(header):
    with pytest.raises(InvalidRequest, match="one generation") as refused:
        read(prompt="a", headers={"if-match": header})

    assert refused.value.param == "If-Match"


def test_max_tokens_zero_asks_for_prefill_only():
    assert read(prompt="a", max_tokens=0).prefill_only
    assert not read(prompt="a", max_tokens=1).prefill_only
    assert not read(prompt="a").prefill_only
