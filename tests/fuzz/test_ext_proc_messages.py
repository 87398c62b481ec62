"""Streams that no Envoy sends, at the real external processor: each one ends, with a status that says something."""

from __future__ import annotations

import json
import threading

import grpc
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from contextcache.extproc.v3 import external_processor_pb2 as pb
from gateway.envoy.server import SERVICE_NAME
from tests.kit.ext_proc import BUFFERED, DUPLEX, answer_body, body, head, trailers
from tests.kit.gateway_parts import KEY

DEADLINE_S = 40
"""The processor's own is 2 s (`stack.py`); the rest is for a machine that stands still."""
FINE = {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED}
NOT_OURS = FINE | {grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED}
"""Of bytes that are no message: gRPC refuses them before we see them."""
MISUSE = "the proxy must send request bodies"

TEXTS = st.text(max_size=30) | st.sampled_from(("", "/v1/context", "/v1/completions", "POST", "GET", "\0", "é"))
NAMES = st.sampled_from((
    ":method", ":path", ":authority", ":scheme", "content-length", "content-type", "authorization", "x-session-id",
    "x-request-id", "traceparent", "X-Upper", "", "x-context-identity", "transfer-encoding",
))  # fmt: skip
RAW = st.one_of(
    st.binary(max_size=30),
    st.sampled_from((
        b"POST", b"GET", b"/v1/completions", b"/v1/context", b"/v1/embeddings", b"/v1/context/%00", b"9" * 20, b"-1",
        b"multipart/form-data", b"application/json", f"Bearer {KEY}".encode(), b"ctx_1", b"ctx_1,ctx_2", b"\xff\xfe",
    )),
)  # fmt: skip
HEADER_MAPS = st.lists(
    st.builds(pb.HeaderValue, key=NAMES, value=st.just(""), raw_value=RAW)
    | st.builds(pb.HeaderValue, key=TEXTS, value=TEXTS),
    max_size=8,
).map(lambda headers: pb.HeaderMap(headers=headers))
MODES = st.integers(-1, 7)
CONFIGS = st.builds(pb.ProtocolConfiguration, request_body_mode=MODES, response_body_mode=MODES)
PIECES = st.builds(pb.HttpBody, body=RAW | st.just(b'{"model": "m", "prompt": "x"}'), end_of_stream=st.booleans())
HEADS = st.builds(pb.HttpHeaders, headers=HEADER_MAPS, end_of_stream=st.booleans())
TRAILERS = st.builds(pb.HttpTrailers, trailers=HEADER_MAPS)
ANY = st.one_of(
    st.builds(pb.ProcessingRequest, request_headers=HEADS, protocol_config=CONFIGS, observability_mode=st.booleans()),
    st.builds(pb.ProcessingRequest, response_headers=HEADS),
    st.builds(pb.ProcessingRequest, request_body=PIECES),
    st.builds(pb.ProcessingRequest, response_body=PIECES),
    st.builds(pb.ProcessingRequest, request_trailers=TRAILERS),
    st.builds(pb.ProcessingRequest, response_trailers=TRAILERS),
    st.just(pb.ProcessingRequest()),
)
GOOD_HEADS = st.builds(
    head,
    st.sampled_from(("/v1/completions", "/v1/context", "/v1/embeddings", "/v1/models", "/v1/x")),
    headers=st.lists(st.tuples(NAMES.filter(lambda name: name and name[0] != ":"), RAW), max_size=3),
    mode=st.sampled_from((BUFFERED, DUPLEX, None, 1, 3)),
    ends=st.booleans(),
    shows_answer=st.booleans(),
    subset=st.sampled_from((None, "", "127.0.0.1:1", "é")),
)
STREAMS = st.tuples(st.one_of(ANY, GOOD_HEADS), st.lists(ANY, max_size=5)).map(lambda parts: [parts[0], *parts[1]])


@pytest.fixture(scope="module")
def process(stack):
    """Return what sends serialized messages and returns status and answers; `holds`: our half stays open."""
    with grpc.insecure_channel(f"127.0.0.1:{stack.ext_proc_port}") as channel:
        method = channel.stream_stream(f"/{SERVICE_NAME}/Process")

        def sent(raw: list[bytes], *, holds: bool = False) -> tuple[grpc.StatusCode, list[bytes]]:
            ended = threading.Event()

            def messages():
                yield from raw
                if holds:
                    ended.wait(DEADLINE_S)

            call, answers = method(messages(), timeout=DEADLINE_S), []
            try:
                answers.extend(call)
            except grpc.RpcError:
                pass
            finally:
                ended.set()
            return call.code(), answers

        yield sent


def check_answers(raw: list[bytes]) -> None:
    for answer in map(pb.ProcessingResponse.FromString, raw):
        if answer.WhichOneof("response") != "immediate_response":
            continue
        told = json.loads(answer.immediate_response.body)
        status = answer.immediate_response.status.code
        assert 400 <= status < 500 or status == 503 or told["detail"].startswith(MISUSE), told


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(STREAMS)
@example([head(ends=True), head(ends=True)])
@example([head(mode=DUPLEX), trailers(), body(b"{}")])
@example([head(mode=BUFFERED), answer_body(b"x"), body(b"{}")])
@example([head("/v1/context", mode=BUFFERED), body(b"[" * 100_000)])
@example([head(headers=[("content-length", b"9" * 5000)]), body(b"{}")])
def test_any_messages_end_in_a_status_that_says_something(process, messages):
    """Seen to fail with errors let out of `EnvoyFront` (UNKNOWN)."""
    code, answers = process([message.SerializeToString() for message in messages])

    assert code in FINE, code
    check_answers(answers)


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=80), min_size=1, max_size=3))
def test_bytes_that_are_no_message_are_refused_by_name(process, messages):
    code, answers = process(messages)

    assert code in NOT_OURS, code
    check_answers(answers)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [head(mode=BUFFERED)],
        [head(mode=DUPLEX), body(b'{"a"', ends=False)],
        [head("/v1/embeddings", mode=DUPLEX, shows_answer=True), body(b"{}", ends=False)],
    ],
    ids=["nothing", "a head", "half a body", "half a body, and the answer to come"],
)
def test_a_stream_that_says_no_more_is_ended(process, messages):
    """Seen to fail, until the call's own deadline, with the processor's timeout taken away."""
    code, answers = process([message.SerializeToString() for message in messages], holds=True)

    assert code in FINE, code
    check_answers(answers)
