"""The OpenAPI document and reference/http-api.md tell of the same calls, errors and headers, and of the same fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from contextcache.fields import OUR_FIELDS
from contextcache.model import MAX_TTL_S, MIN_TTL_S
from gateway.fronts import CORS_EXPOSED_HEADERS
from gateway.http import routes

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("reference/http-api", "guides/contexts", "concepts/append-or-replay", "reference/usage", "guides/streams",
         "guides/retries", "guides/accounting", "guides/kept-conversations", "reference/errors")  # fmt: skip
DOC = re.sub(r"\]\([^)]*\)", "]", "".join((DOCS / f"{page}.md").read_text() for page in PAGES))
NO_CALL = {"method_not_allowed"}
"""Answered to what is no operation of the document."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    app = FastAPI()
    for router in (routes.contexts, routes.turns, routes.operations):
        app.include_router(router)
    return app.openapi()


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


def listed_errors() -> set[tuple[str, str]]:
    rows = set(re.findall(r"^\| (\d{3}) \| `(\w+)` \|", DOC, re.MULTILINE))
    return rows | set(re.findall(r"the engine's (404) `(model_not_found)`", DOC))


def headers_in(text: str) -> set[str]:
    return {
        name.lower() for name in re.findall(r"`?\b((?:X-|If-|Idempotent?-?|Retry-|Server-)[A-Za-z-]+|Allow)\b", text)
    }


def test_the_calls_are_the_same(document):
    """Seen to fail with the row of the rewind taken out."""
    table = DOC[DOC.index("| call | does |") : DOC.index("## What a body may hold")]
    told = set()
    for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE):
        method = ""
        for found, path in re.findall(r"(GET|POST|PATCH|DELETE)? ?(/[\w/{}.]+)", row):
            method = found or method
            told.add((method, path.replace("{id}", "{session_id}")))
    named = {(method, path) for method, path, _ in operations(document)}

    # What is passed on without a context, and pages.
    assert {path for _, path in told - named} == {"/v1/messages", "/v1/responses", "/v1/", "/openapi.json", "/console"}
    assert named <= told


def test_the_errors_are_the_same_with_their_statuses(document):
    """Seen to fail with `generation_gone` taken out of the page."""
    named = set().union(*(codes_of(operation) for _, _, operation in operations(document)))

    assert named == {(status, code) for status, code in listed_errors() if code not in NO_CALL}


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


def test_the_headers_of_requests_are_the_same(document):
    """Seen to fail with `X-Context-Keep` left out of the document."""
    asked = DOC[DOC.index("| field or header | meaning |") : DOC.index("claim a context: when there is none")]
    told = headers_in(asked) | {"x-context-keep", "x-session-id"}
    named = {
        parameter["name"].lower()
        for _, _, operation in operations(document)
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "header"
    }

    assert named == told


def test_the_headers_of_answers_are_the_same(document):
    named = {
        name.lower()
        for _, _, operation in operations(document)
        for answer in operation["responses"].values()
        for name in answer.get("headers", ())
    }
    receipt = headers_in(DOC[DOC.index("## Receipt headers") : DOC.index("# Streams")])

    # A page of a browser may read all of them.
    assert named == set(CORS_EXPOSED_HEADERS) - {"allow"}
    assert receipt <= named
    assert all(name in DOC.lower() for name in named)


def test_the_fields_that_are_ours_are_the_same(document):
    """Seen to fail with `truncated_tokens` taken out of the model, and with `context_commit` out of the page."""
    schemas = document["components"]["schemas"]
    usage = DOC[DOC.index("| field of `usage.context` | meaning |") : DOC.index("### Where a replay diverges")]
    rows = set(re.findall(r"^\| `(\w+)` \|", usage, re.MULTILINE))
    turn = schemas["ChatCompletion"]["properties"].keys()

    assert schemas["ContextUsage"]["properties"].keys() == rows
    assert turn >= OUR_FIELDS
    assert all(f"`{name}`" in DOC for name in turn)


def test_a_life_as_text_has_the_bounds_of_one_as_a_number(document):
    """Seen to fail with `604[0-7]` written `60[0-4]`."""
    _, text = document["components"]["schemas"]["CreateFromPrompt"]["properties"]["ttl"]["anyOf"]

    allowed = {life for life in range(2 * MAX_TTL_S) if re.search(text["pattern"], f"{life}s")}
    assert allowed == set(range(MIN_TTL_S, MAX_TTL_S + 1))
    assert not any(re.search(text["pattern"], odd) for odd in ("90", "090s", "90s ", "x90s", "90ss"))
