"""Malformed bodies are refused with line, column and the comma's name."""

import pytest

from contextcache.errors import InvalidRequest
from contextcache.json_body import parse_object

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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (EP_CREATE, "line 4, column 17: extra comma before '}'"),
        (EP_ASK, "line 2, column 32: missing comma"),
        (b'{"a": [1, 2,]}', "line 1, column 12: extra comma before ']'"),
        (b"", "the body is empty"),
        (b"  \n", "the body is empty"),
        (b'{"a": ', "line 1, column 7"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "too many digits"),
    ],
)
def test_what_is_wrong_and_where_is_said(body, message):
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)

    assert message in caught.value.message


def test_a_proper_body_is_its_object():
    assert parse_object('{"é": [1, null, "\\u00e9"]}'.encode()) == {"é": [1, None, "é"]}
