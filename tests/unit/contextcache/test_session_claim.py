"""Which context a request names, and whether it insists."""

import pytest

from contextcache.errors import InvalidRequest
from contextcache.session_claim import SessionClaim, may_claim_session, session_claim


def test_the_body_claims_and_the_header_only_labels():
    assert session_claim({"session_id": "s"}, None) == SessionClaim("s", binding=True)
    assert session_claim({}, "s") == SessionClaim("s", binding=False)
    assert session_claim(None, None) is None
    assert session_claim({"session_id": None}, None) is None


def test_body_and_header_must_not_name_different_contexts():
    assert session_claim({"session_id": "s"}, "s") == SessionClaim("s", binding=True)
    with pytest.raises(InvalidRequest):
        session_claim({"session_id": "s"}, "t")


@pytest.mark.parametrize("named", ["", "a:b", "{x}", "a" * 129, "../x", 5, ["s"], "s\n", ".hidden"])
def test_an_id_that_cannot_be_one_is_refused_in_the_body(named):
    with pytest.raises(InvalidRequest):
        session_claim({"session_id": named}, None)


def test_an_id_that_cannot_be_one_in_the_header_is_somebodys_label():
    assert session_claim({}, "a:b") is None


def test_a_header_that_is_repeated_names_its_context_all_the_same():
    assert session_claim(None, "s, s") == session_claim({}, "s,s,s") == SessionClaim("s", binding=False)
    assert session_claim({"session_id": "s"}, "s, s") == SessionClaim("s", binding=True)
    assert session_claim(None, "my agent, run 7") is None


@pytest.mark.parametrize("body", [None, {"session_id": "s"}])
def test_a_header_that_is_repeated_with_different_contexts_is_refused(body):
    with pytest.raises(InvalidRequest):
        session_claim(body, "s, t")


def test_a_key_spelled_with_escapes_is_not_overlooked():
    assert may_claim_session(b'{"session_id": "s"}')
    assert may_claim_session(rb'{"session\u005fid": "s"}')
    assert not may_claim_session(b'{"prompt": "session"}')
