"""Checks of answers against the gateway's OpenAPI document, which must name every field."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import cache
from typing import Any

import httpx
import jsonschema

from gateway.http.openapi import document


async def check_answer(response: httpx.Response) -> None:
    """Compare the JSON answer of a control call with the document. An undocumented field fails too."""
    found = _operation(response.request.method, response.request.url.path)
    if found is None or "json" not in response.headers.get("content-type", ""):
        return
    await response.aread()
    schema = found["responses"][str(response.status_code)]["content"]["application/json"]["schema"]
    components = _closed()["components"]
    jsonschema.Draft202012Validator(schema | {"components": components}).validate(response.json())


def _operation(method: str, path: str) -> dict[str, Any] | None:
    for template, methods in document()["paths"].items():
        pattern = re.sub(r"\{\w+\}", "[^/]+", template)
        if method.lower() in methods and re.fullmatch(pattern, path):
            operation: dict[str, Any] = methods[method.lower()]
            return operation
    return None


@cache
def _closed() -> dict[str, Any]:
    """Return the document with objects that allow no further field, unless they say so."""
    found = deepcopy(document())
    for schema in found["components"]["schemas"].values():
        schema.setdefault("additionalProperties", False)
    return found
