"""The tree of errors: gRPC's statuses, which it knows by name only, and the statuses and types that clients get."""

import json

import pytest

from contextcache.client.errors import BY_CODE
from contextcache.errors import ContextCacheError, error_body
from contextcache.wire.rpc import status_of
from deploy.docs.errors import statuses


def family(error_class: type[ContextCacheError]) -> list[type[ContextCacheError]]:
    return [error_class, *(below for child in error_class.__subclasses__() for below in family(child))]


LISTED = sorted(
    (str(status), code) for code, status in statuses().items() if code in BY_CODE and code != "model_not_found"
)
CLASSES = {error_class.code: error_class for error_class in family(ContextCacheError)}
TYPES = {"401": "authentication_error", "429": "rate_limit_error"}


def test_every_error_has_a_status_that_grpc_knows():
    classes = family(ContextCacheError)

    statuses = {error_class.__name__: status_of(error_class("x")).name for error_class in classes}

    assert statuses == {error_class.__name__: error_class.grpc_status for error_class in classes}
    assert "OK" not in statuses.values()


@pytest.mark.parametrize(("status", "code"), LISTED)
def test_a_listed_error_has_its_status_and_the_type_that_goes_with_it(status, code):
    """Seen to fail: with `server_error` an OpenAI client would take a busy context for a broken server."""
    error = CLASSES[code]("what happened")
    error.param = "prompt"
    expected = "server_error" if status >= "500" else TYPES.get(status, "invalid_request_error")

    assert error.http_status == int(status)
    assert json.loads(error_body(error)) == {
        "type": "error",
        "error": {"message": "what happened", "type": expected, "code": code, "param": "prompt"},
        "detail": "what happened",
    }
