"""The main job on real parts: create, continue and delete contexts of SmolLM2 through either front.

Equality is tested in float32, greedy: a cold answer is a stateless one over the same token ids, which shares no prefix
cache with a context because contexts have a salt.
"""

import httpx
import openai
import pytest

from tests.kit.caller import Caller
from tests.kit.kept_kv import forget_everything
from tests.kit.stack import KEY, MODEL
from tests.kit.until import wait_until
from tests.kit.vllm_answers import LOGPROB_TOLERANCE, ids_of_length, logprobs, prompt_ids, tokens
from tests.vllm.conftest import TOMBSTONE_S, both_fronts, http_front_too

pytestmark = pytest.mark.timeout(900)

LENGTHS = [129, *(pytest.param(length, marks=pytest.mark.thorough) for length in (1, 32, 33, 128, 257, 2500))]
"""More than a block; a token, the edges of pages and blocks, several chunks of prefill."""


@pytest.fixture
def api(client):
    with openai.OpenAI(base_url=f"{client.url}/v1", api_key=KEY) as api:
        yield api


@both_fronts
def test_the_eps_story_falls_to_one_prompt_token(client):
    create = client.create(prompt="Say this is a test", ttl=3600)

    ask = client.complete(prompt="Say this is a test", session_id=create["session_id"])

    assert create["usage"]["prompt_tokens"] == 5
    assert ask["usage"]["prompt_tokens"] == 1
    assert ask["usage"]["total_tokens"] == 1 + ask["usage"]["completion_tokens"]
    assert ask["usage"]["prompt_tokens_details"] is None
    assert ask["choices"][0]["text"] == create["choices"][0]["text"]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_context_of_any_length_replays_to_one_token_from_the_sidecar_with_the_cold_answer(client, length):
    # Of its own: a block that another test's context has left on disk is not put into memory again.
    prompt = ids_of_length(length, seed=length)
    cold = client.complete(prompt=prompt, return_token_ids=True, logprobs=1)
    session_id = client.create(prompt=prompt)["session_id"]
    client.wait_sealed(session_id)
    client.forget_prefixes()

    warm = client.complete(prompt=prompt, session_id=session_id, return_token_ids=True, logprobs=1)

    assert warm["usage"]["prompt_tokens"] == 1
    if length > 1:
        assert warm["usage"]["context"]["source"] == "host"
    assert tokens(warm) == tokens(cold)
    assert logprobs(warm) == pytest.approx(logprobs(cold), abs=LOGPROB_TOLERANCE)


@http_front_too
@pytest.mark.parametrize("streaming", [False, True])
def test_three_appended_turns_give_the_ids_of_one_request_with_the_whole_history(client, streaming):
    asks = ["Once upon a time", " there lived a king. He said", " and the queen said"]
    first = client.create(prompt=asks[0], return_token_ids=True)
    history = prompt_ids(first) + tokens(first)

    for text in asks[1:]:
        if streaming:
            events = client.stream(
                "/v1/completions", prompt=text, session_id=first["session_id"], return_token_ids=True
            )
            choices = [event["choices"][0] for event in events if event["choices"]]
            given = choices[0]["prompt_token_ids"]
            answered = [token for choice in choices for token in choice["token_ids"]]
        else:
            answer = client.complete(prompt=text, session_id=first["session_id"], return_token_ids=True)
            given, answered = prompt_ids(answer), tokens(answer)
        new = client.engine.post("/tokenize", json={"model": MODEL, "prompt": text}).json()["tokens"]
        cold = client.complete(prompt=history + new, return_token_ids=True)

        assert given == history + new
        assert answered == tokens(cold)
        history += new + answered


@http_front_too
def test_chat_turns_that_send_only_the_new_message_give_the_ids_of_the_whole_history(client):
    asks = ["What is the capital of France?", "And of Spain?", "And of Italy?"]
    messages = [{"role": "user", "content": asks[0]}]
    answer = client.create(messages=messages, return_token_ids=True, max_tokens=32)
    session_id = answer["session_id"]

    for text in asks[1:]:
        messages += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]
        messages += [{"role": "user", "content": text}]
        answer = client.chat(messages=messages[-1:], session_id=session_id, return_token_ids=True, max_tokens=32)
        whole = client.chat(messages=messages, return_token_ids=True, max_tokens=32)

        assert prompt_ids(answer) == prompt_ids(whole)
        assert tokens(answer) == tokens(whole)
        assert answer["choices"][0]["message"]["content"] == whole["choices"][0]["message"]["content"]


@http_front_too
def test_a_chat_client_that_sends_the_whole_list_again_pays_only_for_the_new_message(client):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    first = client.create(messages=messages, max_tokens=32)
    messages += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}]
    messages += [{"role": "user", "content": "And of Spain?"}]

    again = client.chat(messages=messages, session_id=first["session_id"], max_tokens=32)

    context, before = again["usage"]["context"], first["usage"]
    assert context["context_tokens"] == before["prompt_tokens"] + before["completion_tokens"]
    assert context["cached_tokens"] >= context["context_tokens"] - 1
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": context["cached_tokens"]}
    assert again["usage"]["prompt_tokens"] == context["cached_tokens"] + context["computed_tokens"]


def test_delete_frees_every_byte_and_the_id_is_not_found(client, stored):
    forget_everything(client.stack)
    session_id = client.create(prompt=ids_of_length(600))["session_id"]
    client.complete(prompt=" more", session_id=session_id)
    client.wait_sealed(session_id)
    assert stored() > 0

    client.delete(session_id)

    assert stored() == 0
    for response in (
        client.http.get(f"/v1/context/{session_id}"),
        client.http.delete(f"/v1/context/{session_id}"),
        client.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "session_id": session_id}),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "context_not_found")


def test_a_delete_frees_nothing_another_context_holds(client, stored):
    forget_everything(client.stack)
    one = client.create(prompt=ids_of_length(600))["session_id"]
    client.wait_sealed(one)
    alone = stored()
    two = client.create(prompt=ids_of_length(600))["session_id"]
    client.wait_sealed(two)
    both = stored()

    client.delete(one)
    client.forget_prefixes()
    kept = client.complete(prompt=ids_of_length(600), session_id=two)

    assert both < 2 * alone
    assert kept["usage"]["prompt_tokens"] == 1
    client.delete(two)
    assert stored() == 0


@pytest.mark.thorough
def test_a_context_whose_time_is_over_is_gone_then_not_found_and_its_bytes_are_collected(client):
    forget_everything(client.stack)
    # Long enough for a machine so busy that an answer takes ten seconds: it must not be over before it was given.
    session_id = client.create(prompt=ids_of_length(300), max_tokens=1, ttl=20)["session_id"]

    def status():
        return client.http.get(f"/v1/context/{session_id}").status_code

    assert status() == 200
    wait_until(status, is_so=lambda status: status == 410, what="the context has expired")
    client.stack.wait_nothing_stored()
    wait_until(status, is_so=lambda status: status == 404, what="it is forgotten", deadline_s=TOMBSTONE_S + 30)


@http_front_too
def test_the_openai_client_works_unchanged(client, api):
    session_id = client.create(prompt="The sun is", ttl=600)["session_id"]
    ours = {"session_id": session_id}

    whole = api.completions.create(model=MODEL, prompt=" and the moon", max_tokens=4, extra_body=ours)
    streamed = list(
        api.completions.create(model=MODEL, prompt=" and the sea", max_tokens=4, stream=True, extra_body=ours)
    )

    assert whole.usage.context["committed"]
    assert all(chunk.choices for chunk in streamed)
    assert streamed[-1].usage.context["committed"]
    assert client.get(session_id)["generation"] == 3


@http_front_too
def test_the_openai_client_works_unchanged_for_chat(client, api):
    session_id = client.create(messages=[{"role": "user", "content": "My name is Ada."}], ttl=600)["session_id"]
    ours = {"session_id": session_id}
    message = [{"role": "user", "content": "What is my name?"}]

    whole = api.chat.completions.create(model=MODEL, messages=message, max_tokens=16, temperature=0, extra_body=ours)
    chunks = list(
        api.chat.completions.create(
            model=MODEL,
            messages=message,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=ours,
        )
    )

    assert whole.choices[0].message.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.context["committed"]
    assert chunks[-1].session_id == session_id


@http_front_too
def test_a_client_that_leaves_mid_stream_commits_nothing_and_the_next_turn_runs(client):
    session_id = client.create(prompt="Count: one, two,", ttl=600)["session_id"]
    body = {"model": MODEL, "prompt": " three,", "session_id": session_id, "stream": True, "max_tokens": 2000}
    with client.http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response:
        next(response.iter_lines())

    def next_turn():
        answer = client.http.post("/v1/completions", json=body | {"stream": False, "max_tokens": 2})
        return answer if answer.status_code == 200 else None

    answer = wait_until(next_turn, what="the next turn is answered")
    assert answer.headers["x-context-generation"] == "2"


@pytest.mark.thorough
@both_fronts
def test_two_turns_at_once_are_one_answer_and_one_409(client):
    session_id = client.create(prompt="Count: one, two,", ttl=600)["session_id"]
    body = {"model": MODEL, "prompt": " three,", "session_id": session_id, "stream": True, "ignore_eos": True}
    # An answer may be over before the second request comes through a busy machine; a longer one is not.
    for max_tokens in (200, 800, 3200):
        with client.http.stream("POST", "/v1/completions", json=body | {"max_tokens": max_tokens}) as first:
            lines = first.iter_lines()
            next(lines)
            second = client.http.post("/v1/completions", json=body | {"stream": False, "max_tokens": 1})
            rest = [line for line in lines if line]
        if second.status_code != 200:
            break

    assert (second.status_code, second.json()["error"]["code"]) == (409, "context_busy")
    assert int(second.headers["retry-after"]) >= 1
    assert rest[-1] == "data: [DONE]"


@pytest.mark.thorough
def test_without_the_manager_stateless_requests_pass_and_sessions_get_503(client):
    session_id = client.create(prompt="Hello", ttl=600)["session_id"]
    client.stack.kill("manager")

    stateless = client.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi", "max_tokens": 2})
    session = client.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi", "session_id": session_id})
    create = client.http.post("/v1/context", json={"model": MODEL, "prompt": "Hi"})
    client.stack.start("manager")

    assert stateless.status_code == 200
    for refused in (session, create):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert refused.headers["retry-after"]
    body = {"model": MODEL, "prompt": "Hi", "session_id": session_id}
    wait_until(
        lambda: client.http.post("/v1/completions", json=body).status_code,
        is_so=lambda status: status == 200,
        what="the session is served again",
    )


@pytest.mark.thorough
def test_without_the_sidecar_answers_go_on_and_saves_resume_when_it_is_back(client):
    session_id = client.create(prompt=ids_of_length(300))["session_id"]
    client.stack.kill("sidecar")
    client.forget_prefixes()

    answer = client.complete(prompt=ids_of_length(300), session_id=session_id)
    client.stack.start("sidecar")

    assert answer["usage"]["prompt_tokens"] == 300
    assert answer["usage"]["context"]["source"] == "recompute"
    assert answer["usage"]["context"]["committed"]
    # The connector asks an absent sidecar ever more rarely, every 10 s at most.
    wait_until(lambda: is_saved(client), what="saves go on", deadline_s=120)


def is_saved(client):
    """Create a context and return whether its KV came to be."""
    session_id = client.create(prompt=ids_of_length(40))["session_id"]
    return client.sealed(session_id)


BAD_BODIES = {
    "ttl zero": ({"prompt": "x", "ttl": 0}, 400, "ttl_out_of_range"),
    "ttl negative": ({"prompt": "x", "ttl": -1}, 400, "ttl_out_of_range"),
    "ttl huge": ({"prompt": "x", "ttl": 10**12}, 400, "ttl_out_of_range"),
    "ttl text": ({"prompt": "x", "ttl": "x"}, 400, "invalid_request"),
    "empty prompt": ({"prompt": ""}, 400, "invalid_request"),
    "no prompt": ({}, 400, "invalid_request"),
    "two answers": ({"prompt": "x", "n": 2}, 400, "invalid_request"),
    "two prompts": ({"prompt": ["x", "y"]}, 400, "invalid_request"),
    "over the window": ({"prompt": [5] * 9000}, 400, "context_length_exceeded"),
    "ids outside the vocabulary": ({"prompt": [10**8]}, 400, "invalid_request"),
    "unknown model": ({"prompt": "x", "model": "no-such-model"}, 404, "model_not_found"),
}


@http_front_too
def test_bad_input_is_a_typed_error_and_nothing_is_stored(client, stored):
    forget_everything(client.stack)

    def refused(body):
        response = client.http.post("/v1/context", json={"model": MODEL, "max_tokens": 2} | body)
        error = response.json()
        assert error["detail"] == error["error"]["message"]
        return response.status_code, error["error"]["code"]

    found = {name: refused(body) for name, (body, *_) in BAD_BODIES.items()}

    assert found == {name: (status, code) for name, (_, status, code) in BAD_BODIES.items()}
    assert client.http.get("/v1/context").json()["data"] == []
    assert stored() == 0
    assert client.complete(prompt="alive?")["choices"]


MISTAKES = [
    ("/v1/context", {"prompt": "x", "max_tokens": "a"}, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "temperature": 9}, "temperature"),
    ("/v1/completions", {"prompt": "x", "top_p": [1]}, "top_p"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logit_bias": "x"}, "logit_bias"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": "a"}, "max_tokens"),
    ("/v1/responses", {"input": "x", "tool_choice": "required"}, "tool_choice"),
    ("/v1/responses", {"input": "x", "top_logprobs": "a"}, "top_logprobs"),
]


@pytest.mark.parametrize(("path", "wrong", "param"), MISTAKES)
def test_a_refusal_by_the_engine_is_one_sentence_with_the_field(client, path, wrong, param):
    """Seen to fail: `1 validation error:` and a Python dictionary, `param: null`, and 502 on responses."""
    named = {"session_id": f"refused-{param}"} | ({} if path == "/v1/context" else {"context_create": "if_missing"})
    response = client.http.post(path, json={"model": MODEL, "max_tokens": 2} | named | wrong)

    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_request", param), error
    assert not [word for word in ("\n", "{'", "validation error", "parameter=") if word in error["message"]]


@http_front_too
def test_invalid_json_is_refused_with_line_and_column(client):
    create = b'{\n  "model": "m",\n  "prompt": "Say this is a test",\n  "ttl": 3600,\n}'
    ask = b'{\n  "session_id": "session-01"\n  "model": "m",\n  "prompt": "x"\n}'
    headers = {"content-type": "application/json"}

    extra = client.http.post("/v1/context", content=create, headers=headers)
    missing = client.http.post("/v1/completions", content=ask, headers=headers)

    assert (extra.status_code, missing.status_code) == (400, 400)
    assert "line 4, column 14: extra comma" in extra.json()["detail"]
    assert "line 2, column 29: missing comma" in missing.json()["detail"]


@http_front_too
def test_unknown_and_foreign_contexts_get_the_same_answer(client, other):
    session_id = client.create(prompt="secret", ttl=600)["session_id"]

    def refusals(session_id):
        body = {"model": MODEL, "prompt": "x", "session_id": session_id}
        return [
            other.http.post("/v1/completions", json=body),
            other.http.get(f"/v1/context/{session_id}"),
            other.http.delete(f"/v1/context/{session_id}"),
        ]

    for foreign, unknown in zip(refusals(session_id), refusals("ctx_" + "0" * 32), strict=True):
        assert foreign.status_code == 404
        assert foreign.content == unknown.content


@http_front_too
def test_no_key_and_a_wrong_key_are_refused(client):
    for key in ("", "test-key-wrong"):
        caller = Caller(client.stack, key, front=client.front)
        response = caller.http.post("/v1/context", json={"model": MODEL, "prompt": "x"})
        caller.close()

        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.thorough
@http_front_too
def test_a_body_over_the_limit_is_refused_and_a_large_one_below_it_gets_the_engines_answer(client):
    over = client.http.post("/v1/context", json={"model": MODEL, "prompt": "x" * (33 << 20)})
    below = client.http.post("/v1/context", json={"model": MODEL, "prompt": "x " * (5 << 20)})

    assert (over.status_code, over.json()["error"]["code"]) == (413, "body_too_large")
    assert (below.status_code, below.json()["error"]["code"]) == (400, "context_length_exceeded")


@http_front_too
def test_a_forged_identity_is_stripped_at_the_edge_and_refused_in_the_pod(client):
    forged = {"x-context-identity": "v1.eyJ0ZW5hbnQiOiJkZW1vIn0." + "0" * 64}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}

    edge = client.http.post("/v1/completions", json=body, headers=forged)
    pod = client.turn.post("/v1/context", json=body, headers=forged)
    unsigned = client.turn.post("/v1/context", json=body)

    assert edge.status_code == 200
    assert "x-context-cache" not in edge.headers
    assert (pod.status_code, pod.json()["error"]["code"]) == (401, "invalid_identity")
    assert unsigned.status_code == 404


@http_front_too
def test_a_session_header_nobody_knows_is_somebodys_label(client):
    response = client.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "x", "max_tokens": 2},
        headers={"x-session-id": "somebodys-label"},
    )

    assert response.status_code == 200
    assert "x-context-cache" not in response.headers


@http_front_too
def test_other_routes_pass_through(client):
    assert client.http.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert isinstance(client.http.get("/v1/nothing"), httpx.Response)
