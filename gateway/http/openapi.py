"""The gateway's OpenAPI document: `openapi.yaml`. Its head names the parts that this module fills in."""

from __future__ import annotations

import importlib.resources
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import yaml

from contextcache.errors import ERRORS_BY_CODE

Json = dict[str, Any]

_ENGINE_STATUSES = (400, 404)
"""Statuses at which a turn's error may be the engine's, in the engine's own form."""


@cache
def document() -> Json:
    """Return the served document. Callers must not change it."""
    text = importlib.resources.files(__package__).joinpath("openapi.yaml").read_bytes()
    found: Json = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  # both are safe
    shared = found.pop("x-shared")
    found["info"]["version"] = version("context-cache-server")
    for schema in found["components"]["schemas"].values():
        schema |= {"type": "object", "required": schema.get("required", list(schema["properties"]))}
    for operation in operations(found).values():
        codes, responses = _flat(operation.pop("x-errors", [])), operation["responses"]
        errors = _errors(codes, shared["error_headers"], engine="4XX" in responses)
        operation["responses"] = {
            status: response | {"headers": shared["request_id"] | response.get("headers", {})}
            for status, response in sorted((responses | errors).items())
        }
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


def _errors(codes: Iterator[str], headers: Mapping[int, Json], *, engine: bool) -> Json:
    """Return a response for each status of `codes`. `engine`: the engine answers too, in its own form."""
    by_status = defaultdict[int, set[str]](set)
    for code in codes:
        by_status[ERRORS_BY_CODE[code].http_status].add(code)
    return {
        str(status): _error(sorted(of_status), headers.get(status, {}), engine=engine and status in _ENGINE_STATUSES)
        for status, of_status in by_status.items()
    }


def _error(codes: Sequence[str], headers: Json, *, engine: bool) -> Json:
    described = f"`code`: {', '.join(codes)}"
    schema: Json = {
        "$ref": "#/components/schemas/Error",
        "properties": {"error": {"properties": {"code": {"enum": codes}}}},
    }
    if engine:
        described += "; or an error of the engine itself, for a request without a context"
        schema = {"type": "object"}
    return {"description": described, "headers": headers, "content": {"application/json": {"schema": schema}}}
