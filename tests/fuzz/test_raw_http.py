"""Bytes that are nearly HTTP/1.1, at the HTTP front's socket: answered or closed, and only their sender suffers."""

from __future__ import annotations

import re
import select
import socket
import time
from contextlib import closing, suppress

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from contextcache.wire.http_server import HEAD_SIZE_BYTES_MAX
from tests.kit.gateway_parts import KEY

DEADLINE_S = 40
"""Of one exchange: the body timeout of 2 s, and a machine that stands still now and then."""
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
HIDDEN = b"POST /v1/context HTTP/1.1\r\nhost: g\r\ncontent-length: 2\r\n\r\n{}"
JSON = b'{"model": "toy-model", "prompt": "hello"}'
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(JSON), JSON)

METHODS = (
    b"POST", b"GET", b"DELETE", b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"PRI", b"get", b"P\0ST", b"", b" POST",
)  # fmt: skip
TARGETS = (
    b"/v1/completions", b"/v1/context", b"/healthz", b"/v1/context/ctx_%00", b"*", b"http://other/v1/context",
    b"/\xff", b"", b"/v1/completions?" + b"a" * 9000, b"/v1/completions#x", b"g:80", b"//", b"/\t", b"/%",
    b"/v1/completions HTTP/1.1\r\nx: y",
)  # fmt: skip
VERSIONS = (
    b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.1 ", b"http/1.1", b"", b"HTTPS/1.1", b"HTTP/1.10",
)  # fmt: skip
LENGTHS = (
    b"content-length: %d" % len(JSON), b"content-length: 0", b"content-length: -1", b"content-length: +5",
    b"content-length: 0x10", b"content-length: 5, 5", b"content-length: 18446744073709551617", b"content-length: ",
    b"content-length: 5\r\ncontent-length: 6", b"content-length : 5", b"content-length:5 5", b"\tcontent-length: 5",
)  # fmt: skip
CODINGS = (
    b"transfer-encoding: chunked", b"transfer-encoding: chunked, identity", b"transfer-encoding: xchunked",
    b"transfer-encoding:\x0bchunked", b"transfer-encoding : chunked", b"transfer-encoding: gzip, chunked",
    b"transfer-encoding: chunked\r\ntransfer-encoding: identity", b"transfer-encoding:\r\n chunked", b"te: trailers",
)  # fmt: skip
OTHERS = (
    b"host: g", b"host: a\r\nhost: b", b"connection: close", b"connection: upgrade\r\nupgrade: websocket",
    b"expect: 100-continue",
    b"upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\nconnection: upgrade, http2-settings", b"x\0y: z",
    b"x: a\0b", b"x y: z", b"x: a\r\n b", b"no colon", b": no name", b"x: \xff\xfe", b"\xc3\xa9: z",
    b"x:" + b" " * 3000 + b"y", b"x: a\rb", b"x: a\nb: c", b"\r\n".join(b"x-%d: y" % number for number in range(500)),
    b"x: " + b"a" * (HEAD_SIZE_BYTES_MAX + 1), b"expect: x", b"content-type: multipart/form-data",
    b"x-session-id: ctx_1", b"authorization: Bearer", b"proxy-connection: keep-alive",
)  # fmt: skip
BODIES = (
    b"", JSON, CHUNKED, b"0\r\n\r\n" + HIDDEN, JSON + HIDDEN, b"5\r\nhello\r\n", b"-1\r\n\r\n",
    b"ffffffffffffffff\r\nx", b"fffffffffffffffff\r\nx", b"0x5\r\nhello\r\n0\r\n\r\n",
    b"5;a=" + b"b" * 3000 + b"\r\nhello\r\n0\r\n\r\n", b"\x16\x03\x01\x02\x00", b"5\nhello\n0\n\n",
    b"0\r\nx: y\r\ncontent-length: 5\r\n\r\n", b"0\r\n" + b"x: y\r\n" * 20_000 + b"\r\n", b"5 \r\nhello\r\n0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 300, HIDDEN * 50,
)  # fmt: skip


ASPECTS = ("method", "target", "version", "length", "coding", "other", "body", "end", "key", "repeat")


@st.composite
def requests(draw) -> bytes:
    """A good request with up to three things odd about it."""
    odd = draw(st.sets(st.sampled_from(ASPECTS), max_size=3))

    def one_of(aspect: str, usual: bytes, choices: tuple[bytes, ...]) -> bytes:
        return draw(st.sampled_from(choices)) if aspect in odd else usual

    method, target = one_of("method", b"POST", METHODS), one_of("target", b"/v1/completions", TARGETS)
    line = b" ".join((method, target, one_of("version", b"HTTP/1.1", VERSIONS)))
    headers = [b"host: g"] if "key" in odd else [b"host: g", b"authorization: Bearer " + KEY.encode()]
    headers += draw(st.lists(st.sampled_from(OTHERS), min_size=1, max_size=4)) if "other" in odd else []
    body = one_of("body", CHUNKED if "coding" in odd else JSON, BODIES)
    if "coding" in odd:
        headers.append(draw(st.sampled_from(CODINGS)))
    if "length" in odd or "coding" not in odd:
        headers.append(one_of("length", b"content-length: %d" % len(body), LENGTHS))
    end = one_of("end", b"\r\n", (b"\n", b"\r", b"\r\r\n"))
    whole = end.join((line, *draw(st.permutations(headers)))) + end * 2 + body
    return whole * draw(st.sampled_from((2, 3, 20))) if "repeat" in odd else whole


def exchange(port: int, sent: bytes, *, patience_s: float = 0.03, linger_s: float = 0.0) -> bytes:
    """Send, and return all until the server closes.

    Our half ends when nothing was answered for `patience_s`, or when no more came for `linger_s`: a client that has
    ended is not answered to the end.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    with closing(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)) as connection:
        answer, waits_s = b"", patience_s
        with suppress(OSError):
            connection.sendall(sent)
            while select.select([connection], [], [], waits_s)[0] and (piece := connection.recv(1 << 16)):
                answer, waits_s = answer + piece, linger_s
            connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                answer += piece
                assert time.monotonic() < deadline_s, answer[:300]
        return answer


def is_well(port: int) -> bool:
    return b" 200 " in exchange(port, b"GET /healthz HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n")


AMBIGUOUS = {
    "length and chunks": b"content-length: %d\r\ntransfer-encoding: chunked",
    "chunks and length": b"transfer-encoding: chunked\r\ncontent-length: %d",
    "two lengths": b"content-length: 5\r\ncontent-length: %d",
    "a list of lengths": b"content-length: 5, %d",
    "a length with a sign": b"content-length: +%d",
    "a length in front of a blank": b"content-length : %d",
    "a coding nobody knows": b"transfer-encoding: xchunked\r\ncontent-length: %d",
    "chunks, but not last": b"transfer-encoding: chunked, identity\r\ncontent-length: %d",
    "a coding behind a vertical tab": b"transfer-encoding:\x0bchunked\r\ncontent-length: %d",
    "a folded coding": b"transfer-encoding:\r\n chunked\r\ncontent-length: %d",
    "a coding behind a bare line feed": b"x: y\ntransfer-encoding: chunked\r\ncontent-length: %d",
    "a coding behind a bare return": b"x: y\rtransfer-encoding: chunked\r\ncontent-length: %d",
    "a coding whose name ends in a blank": b"transfer-encoding : chunked\r\ncontent-length: %d",
}


@pytest.mark.parametrize("shape", AMBIGUOUS)
def test_a_body_with_two_readings_is_refused_and_what_it_hides_is_not_done(stack, shape):
    """Seen to fail with `lenient_chunked_length` and `lenient_headers` switched on in the parser."""
    auth = b"host: g\r\nauthorization: Bearer " + KEY.encode() + b"\r\n"
    create = b'{"model": "toy-model", "prompt": "hello", "session_id": "ctx_victim"}'
    typed = auth + b"content-type: application/json\r\n"
    made = b"POST /v1/context HTTP/1.1\r\n" + typed + b"content-length: %d\r\n\r\n" % len(create) + create
    exchange(stack.http_port, made, patience_s=DEADLINE_S)
    hidden = b"DELETE /v1/context/ctx_victim HTTP/1.1\r\n" + auth + b"\r\n"
    body = b"0\r\n\r\n" + hidden
    sent = b"POST /v1/completions HTTP/1.1\r\n" + auth + AMBIGUOUS[shape] % len(body) + b"\r\n\r\n" + body
    statuses = {int(status) for status in STATUS.findall(exchange(stack.http_port, sent, patience_s=5, linger_s=1))}
    read = exchange(stack.http_port, b"GET /v1/context/ctx_victim HTTP/1.1\r\n" + auth + b"\r\n", patience_s=DEADLINE_S)

    assert statuses <= {400, 501}, statuses
    assert b" 200 " in read.splitlines()[0], read


@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(requests())
@example(b"\0" * 100_000)
@example(b"\n" * 100_000)
@example(b"GET / HTTP/1.1\r\nx: " + b"a" * 300_000)
@example(b"GET /" + b"a" * 300_000)
@example(b"A" * 300_000)
@example(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 60_000)
def test_whatever_is_sent_is_answered_or_closed_and_the_next_client_is_served(stack, sent):
    """Refused requests are most of them, so that the parser is tried; the rest is carried to the pod."""
    statuses = {int(status) for status in STATUS.findall(exchange(stack.http_port, sent))}

    assert all(status < 500 or status == 501 for status in statuses), statuses
    assert is_well(stack.http_port)
    assert stack.gateway.process.returncode is None
