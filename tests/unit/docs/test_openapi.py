"""The OpenAPI document names the errors, headers, fields and words of the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from contextcache.claim import TURN_PATHS
from contextcache.client.errors import BY_CODE
from contextcache.client.types import (
    Changes,
    CompactFields,
    ContextInfo,
    ContextUsage,
    CreateFields,
    Divergence,
    KeptInfo,
    TurnInfo,
)
from contextcache.fields import OUR_FIELDS
from contextcache.model import MAX_TTL_S, MIN_TTL_S, SessionState
from deploy import client_ts
from deploy.docs.errors import statuses
from gateway.fronts import CORS_EXPOSED_HEADERS
from gateway.http import routes
from gateway.http.openapi import body_fields
from gateway.http.openapi import document as openapi
from gateway.paths import CONTEXT_PATH, Kind, kind_of
from vllm_plugin.turn.prompt.matching import Outcome, Why

NO_CALL = {"method_not_allowed"}
"""Answered to what is no operation of the document."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return openapi()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, found in document["paths"].items():
        yield from ((method.upper(), path, operation) for method, operation in found.items())


def codes_of(operation: dict[str, Any]) -> set[tuple[str, str]]:
    """Return status and code of every error that an operation names."""
    told = {
        status: re.match(r"`code`: ([\w, ]+)", answer["description"])
        for status, answer in operation["responses"].items()
    }
    return {(status, code.strip()) for status, found in told.items() if found for code in found[1].split(",")}


def test_the_document_has_the_routes_of_the_gateway_and_the_carried_calls(document):
    """Seen to fail with a route of another name, with `/v1/usages`, and with a call of the document left out."""
    routed = {
        (method, route.path.replace(":path", ""), route.name, str(route.status_code or 200))
        for router in (routes.contexts, routes.operations)
        for route in router.routes
        for method in route.methods
    }
    written = {
        (method, path, operation["operationId"], min(operation["responses"]))
        for method, path, operation in operations(document)
    }

    assert routed < written
    assert {(method, path) for method, path, *_ in written - routed} == {
        ("POST", path) for path in {CONTEXT_PATH, *TURN_PATHS}
    }


def test_every_operation_is_a_call_that_the_gateway_knows(document):
    paths = [(method, path.replace("{response_id}", "resp_1_ctx")) for method, path, _ in operations(document)]
    kinds = {kind_of(method, path.replace("{", "").replace("}", ""), frozenset()) for method, path in paths}

    assert kinds == {Kind.CONTROL, Kind.CREATE, Kind.COMPLETION, Kind.OWN}


@pytest.mark.parametrize(
    ("schema", "ours", "unread"),
    [
        ("ContextUsage", ContextUsage, set()),
        ("Diverged", Divergence, set()),
        ("TurnObject", TurnInfo, set()),
        ("ReadContext", ContextInfo, {"object"}),
        ("KeptObject", KeptInfo, {"object", "unreachable"}),
    ],
)
def test_the_client_has_the_fields_of_an_answer(document, schema, ours, unread):
    """Seen to fail with `saved_ms` taken out of the document, and with a field that the client lacks."""
    read = {"bytes" if field.name == "size_bytes" else field.name for field in fields(ours)} - {"raw"}

    assert read == document["components"]["schemas"][schema]["properties"].keys() - unread


def test_the_client_has_the_fields_of_a_request(document):
    """Seen to fail with `context_commit` taken out of the client."""
    create, patch, turn = (
        document["components"]["schemas"]["CreateFromPrompt"]["properties"].keys(),
        body_fields("patch_context")[0],
        document["components"]["schemas"]["Completion"]["properties"].keys(),
    )

    assert Changes.__annotations__.keys() == patch
    assert {*CompactFields.__annotations__, "messages", "prompt", "session_id"} == body_fields("compact_context")[0]
    assert OUR_FIELDS & create <= CreateFields.__annotations__.keys()
    assert OUR_FIELDS & turn - {"context_create"} <= CreateFields.__annotations__.keys()


def test_the_errors_are_the_same_with_their_statuses(document):
    """Seen to fail with `generation_gone` taken out of a call."""
    named = set().union(*(codes_of(operation) for _, _, operation in operations(document)))
    known = statuses()

    assert named == {(str(known[code]), code) for code in BY_CODE.keys() - NO_CALL}


def test_every_operation_with_a_key_may_refuse_it_and_have_a_fault(document):
    for method, path, operation in operations(document):
        codes = {code for _, code in codes_of(operation)}
        assert ({"invalid_api_key", "rate_limit_exceeded", "internal_error"} <= codes) is ("security" in operation), (
            method,
            path,
        )


def test_an_error_has_our_body_and_one_of_the_codes_that_are_named(document):
    for _, _, operation in operations(document):
        for status, code in codes_of(operation):
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            if schema == {"type": "object"}:
                continue  # the engine's own words, perhaps
            assert schema["$ref"] == "#/components/schemas/Error"
            assert code in schema["properties"]["error"]["properties"]["code"]["enum"]


def test_a_page_of_a_browser_may_read_all_headers_of_answers(document):
    """Seen to fail with `X-Context-Mode` left out of the document."""
    named = {
        name.lower()
        for _, _, operation in operations(document)
        for answer in operation["responses"].values()
        for name in answer.get("headers", ())
    }

    assert named == set(CORS_EXPOSED_HEADERS) - {"allow"}


def test_every_field_of_ours_is_in_the_document_and_explained(document):
    """Seen to fail with `truncated_tokens` and the description of `context_commit` taken out of the models."""
    schemas = document["components"]["schemas"]
    turn = schemas["ChatCompletion"]["properties"]

    assert turn.keys() >= OUR_FIELDS
    assert [name for name in OUR_FIELDS if not turn[name].get("description")] == []
    parameters = [given for _, _, operation in operations(document) for given in operation.get("parameters", ())]
    assert [given["name"] for given in parameters if not given.get("description")] == []
    assert [name for name, field in schemas["ContextUsage"]["properties"].items() if not field.get("description")] == []


def test_the_words_of_a_turn_are_those_of_the_code(document):
    """Seen to fail with `edited` misspelt."""
    schemas = document["components"]["schemas"]

    def words(schema: str, field: str) -> set[str]:
        return set(re.findall(r"`([a-z_]+)`", schemas[schema]["properties"][field]["description"]))

    matches = schemas["ContextUsage"]["properties"]["match"]["enum"]
    assert words("Diverged", "why") == {why.value for why in Why}
    assert set(matches) == {outcome.value for outcome in Outcome} | {None}
    assert words("ReadContext", "state") == {state.value for state in SessionState}


def test_a_life_as_text_has_the_bounds_of_one_as_a_number(document):
    """Seen to fail with `604[0-7]` written `60[0-4]`."""
    _, text = document["components"]["schemas"]["CreateFromPrompt"]["properties"]["ttl"]["anyOf"]

    allowed = {life for life in range(2 * MAX_TTL_S) if re.search(text["pattern"], f"{life}s")}
    assert allowed == set(range(MIN_TTL_S, MAX_TTL_S + 1))
    assert not any(re.search(text["pattern"], odd) for odd in ("90", "090s", "90s ", "x90s", "90ss"))


def test_the_typescript_types_are_of_this_document():
    """Seen failing with a description of the document changed. The integration tests generate the types again."""
    first_line = client_ts.TYPES.read_text().partition("\n")[0]

    assert first_line == client_ts.mark(json.dumps(client_ts.for_types())), "run make client-ts"
