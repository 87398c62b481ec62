"""Client mistakes in each dialect: 400 with one sentence and the field, and nothing of the request in our logs."""

from __future__ import annotations

import json
import logging

import pytest

from contextcache.errors import ContextLengthExceeded, EngineFailed, InvalidRequest, ModelNotFound, NoReadyEndpoint
from contextcache.process.logs import traceback_without_messages
from vllm_plugin.turn.refusals import engine_error

SECRET_WORDS = "the patient is called Ann"


def listed(*errors):
    """Return a body as vLLM 0.32 answers what its types refuse (exception_handling/handlers/validation.py)."""
    told = f"{len(errors)} validation errors:\n" + "".join(f"  {error}\n" for error in errors)
    loc = errors[0]["loc"]
    return json.dumps({"error": {"message": told.rstrip(), "type": "Bad Request", "param": loc, "code": 400}}).encode()


WRONG = {"type": "int_parsing", "loc": "body.max_tokens", "input": SECRET_WORDS}


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("Input should be a valid integer, unable to parse string as an integer", "must be a valid integer"),
        ("Input should be 'auto' or 'none'", "must be 'auto' or 'none'"),
        ("Input should be greater than or equal to 0", "must be greater than or equal to 0"),
        ("Field required", "is required"),
        ("Value error, it isn't one", "it isn't one"),
        ("String should have at most 5 characters", "String should have at most 5 characters"),
    ],
)
def test_what_vllms_types_refuse_is_one_sentence_with_the_field(fault, told):
    """Seen to fail: `1 validation error:` and a Python dictionary, with the value, and `param: null`."""
    error = engine_error(400, listed({**WRONG, "msg": fault}, {**WRONG, "msg": "another"}))

    assert type(error) is InvalidRequest
    assert (error.message, error.param) == (f"`max_tokens`: {told}", "max_tokens")


@pytest.mark.parametrize(
    ("status", "message", "kind", "told", "param"),
    [
        (400, "temperature must be in [0, 2] (parameter=temperature, value=9)", InvalidRequest,
         "temperature must be in [0, 2]", "temperature"),
        (400, "This model's maximum context length is 5 tokens.", ContextLengthExceeded,
         "This model's maximum context length is 5 tokens.", "temperature"),
        (400, "2 validation errors:\n  {'type': 'odd...[truncated]", InvalidRequest,
         "`temperature`: is not valid", "temperature"),
        (400, "Two\nlines.\n\nTraceback (most recent call last):", InvalidRequest, "Two lines.", "temperature"),
        (404, "The model `x` does not exist.", ModelNotFound, "The model `x` does not exist.", "model"),
        (503, "It sleeps.", NoReadyEndpoint, "It sleeps.", None),
        (500, "It broke.", EngineFailed, "It broke.", None),
    ],
)  # fmt: skip
def test_other_refusals_of_the_engine_keep_their_words(status, message, kind, told, param):
    body = {"error": {"message": message, "type": "BadRequestError", "param": "temperature", "code": status}}
    error = engine_error(status, json.dumps(body).encode())

    assert (type(error), error.message, error.param) == (kind, told, param)


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"error": "no"}', b'{"error": null}', b"<html>"])
def test_a_refusal_without_words_names_its_status(body):
    assert engine_error(418, body).message == "the engine answered with status 418"


def test_positions_in_lists_are_told_as_openai_tells_them():
    error = engine_error(400, listed({**WRONG, "loc": "body.messages.3.content", "msg": "Field required"}))

    assert (error.message, error.param) == ("`messages[3].content`: is required", "messages[3].content")


MISTAKES = [
    # on /v1/responses: what the body has, and the field that the refusal names
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "none"}}, "tool_choice"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"temperature": "warm"}, "temperature"),
    ({"max_output_tokens": [1]}, "max_output_tokens"),
    ({"top_p": {}}, "top_p"),
    ({"stream": "perhaps"}, "stream"),
    ({"metadata": 5}, "metadata"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}]},
     "tools"),
    ({"input": [{"role": "user", "content": "x"}, {"type": "function_call", "name": "f"}]}, "input[1]"),
    ({"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": SECRET_WORDS}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": 7, "output": SECRET_WORDS}]}, "input[0]"),
    ({"input": []}, "input"),
    ({"reasoning": SECRET_WORDS}, "reasoning"),
    ({"reasoning": {"effort": SECRET_WORDS}}, "reasoning.effort"),
    ({"truncation": SECRET_WORDS}, "truncation"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "param"), MISTAKES)
async def test_a_mistake_in_a_response_is_the_clients(pod, caplog, wrong, param):
    """Seen to fail: 502 engine_error for what vLLM refuses with 400, and a logged traceback with the client's text."""
    caplog.set_level(logging.DEBUG)
    body = {"model": "m", "input": SECRET_WORDS, "conversation": "mine", **wrong}
    answer = await pod.post("/v1/responses", body, pod.identity("mine"))

    error = answer.json["error"]
    assert (answer.status, error["code"]) == (400, "invalid_request"), answer.body
    assert param is None or (error["param"] or "").startswith(param), error
    assert "\n" not in error["message"]
    assert not [word for word in ("{'", "validation error", "parameter=", "Errno") if word in error["message"]]
    assert SECRET_WORDS not in caplog.text
    assert not pod.engine.generations()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_fault_of_ours_is_logged_without_what_the_request_says(pod, caplog, is_stream):
    """Seen to fail: the traceback ended with an exception's message, which quoted the prompt."""

    def broken(*_):
        raise ZeroDivisionError(SECRET_WORDS)

    pod.story.kv.order = broken
    answer = await pod.create(prompt=SECRET_WORDS, stream=is_stream)

    assert (answer.status, answer.json["error"]["code"]) == (502, "engine_error")
    (record,) = [record for record in caplog.records if record.message == "turn failed"]
    assert "ZeroDivisionError" in record.exception
    assert "broken" in record.exception
    assert SECRET_WORDS not in caplog.text + record.exception


async def test_a_fault_in_the_middle_of_an_answer_tells_the_server_nothing_of_the_request(pod, caplog):
    """The server logs what it is given; the connection must end without the answer's end."""

    def failing(*_):
        raise ZeroDivisionError(SECRET_WORDS)

    pod.story._settlement.settle = failing
    with pytest.raises(EngineFailed) as raised:
        await pod.create(prompt=SECRET_WORDS, stream=True)

    assert raised.value.__suppress_context__
    assert SECRET_WORDS not in caplog.text + str(raised.value)


def test_a_traceback_names_types_and_places_of_all_causes():
    def inner():
        raise KeyError(SECRET_WORDS)

    def outer():
        try:
            inner()
        except KeyError as exc:
            raise ValueError(SECRET_WORDS) from exc

    with pytest.raises(ValueError, match=SECRET_WORDS) as raised:
        outer()

    told = traceback_without_messages(raised.value)
    assert [word in told for word in ("builtins.KeyError", "builtins.ValueError", "in inner", "in outer")] == [True] * 4
    assert SECRET_WORDS not in told


PATHS = {
    "/v1/context": {"prompt": "x"},
    "/v1/completions": {"prompt": "x", "session_id": "mine"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "session_id": "mine"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "session_id": "mine"},
    "/v1/responses": {"input": "x", "conversation": "mine"},
}


@pytest.mark.parametrize("kind", [b"", b"text/plain", b"application/x-www-form-urlencoded", b"application/jsonp"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_is_not_declared_as_json_is_refused_as_without_a_context(pod, path, kind):
    """Seen to fail: a create without a content type was answered, a call without a context is vLLM's 400."""
    identity = pod.identity(None if path == "/v1/context" else "mine")
    refused = await pod.post(path, {"model": "m", **PATHS[path]}, identity, headers=[(b"content-type", kind)])

    assert (refused.status, refused.json["error"]["param"]) == (400, "Content-Type"), refused.body
    assert not pod.engine.requests


@pytest.mark.parametrize("path", PATHS)
async def test_every_refusal_has_the_fields_that_each_dialect_reads(pod, path):
    identity = pod.identity(None if path == "/v1/context" else "mine")
    for wrong in ({"model": 7}, {"ttl": "x", "context_create": "if_missing"}, {"context_mode": "x"}):
        refused = await pod.post(path, {"model": "m", **PATHS[path], **wrong}, identity)

        assert refused.status == 400, refused.body
        assert refused.json["type"] == "error"
        assert {"message", "type", "code", "param"} <= refused.json["error"].keys()
