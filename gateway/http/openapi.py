"""The gateway's OpenAPI document: `openapi.yaml`, whose head names the parts that this module fills in."""

from __future__ import annotations

import importlib.resources
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from typing import Any

import yaml

from contextcache.errors import ERRORS_BY_CODE

Json = dict[str, Any]

_TEXT: Json = {"schema": {"type": "string"}}
_SECONDS: Json = {"schema": {"type": "integer", "minimum": 0}}
_REQUEST_ID: Json = {"X-Request-ID": {"required": True, **_TEXT}}
_ERROR_HEADERS: dict[int, Json] = {
    401: {"WWW-Authenticate": {"required": True, **_TEXT}},
    409: {"Retry-After": _SECONDS},
    429: {"Retry-After": _SECONDS},
    503: {"Retry-After": {"required": True, **_SECONDS}},
}
_ENGINE_STATUSES = (400, 404)
"""Statuses at which a turn's error may be the engine's, in the engine's own form."""


@cache
def document() -> Json:
    """Return the served document. Callers must not change it."""
    text = importlib.resources.files(__package__).joinpath("openapi.yaml").read_bytes()
    found: Json = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  # both are safe
    del found["x-shared"]
    found["info"]["version"] = version("context-cache-server")
    for schema in found["components"]["schemas"].values():
        schema |= {"type": "object", "required": schema.get("required", list(schema["properties"]))}
    for operation in operations(found).values():
        codes, written = _flat(operation.pop("x-errors", [])), operation["responses"]
        responses = sorted((written | _errors(codes, engine="4XX" in written)).items())
        operation["responses"] = {status: _with_request_id(response) for status, response in responses}
    return found


@cache
def query_parameters(operation_id: str) -> frozenset[str]:
    """Return the names of the query parameters that an operation takes."""
    parameters = operations(document())[operation_id].get("parameters", ())
    return frozenset(one["name"] for one in parameters if one["in"] == "query")


@cache
def body_fields(operation_id: str) -> tuple[frozenset[str], bool]:
    """Return the names of an operation's body fields, and whether the body is required."""
    body = operations(document())[operation_id]["requestBody"]
    return frozenset(body["content"]["application/json"]["schema"]["properties"]), body["required"]


def operations(found: Json) -> dict[str, Json]:
    """Return the operations of a document by their ids."""
    every = (operation for path in found["paths"].values() for operation in path.values())
    return {operation["operationId"]: operation for operation in every}


def _flat(codes: list[Any]) -> Iterator[str]:
    """Yield the codes of lists within lists."""
    for code in codes:
        yield from _flat(code) if isinstance(code, list) else (code,)


def _errors(codes: Iterator[str], *, engine: bool) -> Json:
    """Return a response for each status of `codes`. `engine`: the engine answers too, in its own form."""
    by_status = defaultdict[int, set[str]](set)
    for code in codes:
        by_status[ERRORS_BY_CODE[code].http_status].add(code)
    return {str(status): _error(status, sorted(of_status), engine=engine) for status, of_status in by_status.items()}


def _error(status: int, codes: list[str], *, engine: bool) -> Json:
    described = f"`code`: {', '.join(codes)}"
    if engine and status in _ENGINE_STATUSES:
        schema: Json = {"type": "object"}
        described += "; or an error of the engine itself, for a request without a context"
    else:
        schema = {
            "$ref": "#/components/schemas/Error",
            "properties": {"error": {"properties": {"code": {"enum": codes}}}},
        }
    headers = _ERROR_HEADERS.get(status, {})
    return {"description": described, "headers": headers, "content": {"application/json": {"schema": schema}}}


def _with_request_id(response: Json) -> Json:
    return response | {"headers": _REQUEST_ID | response.get("headers", {})}
