"""Request bodies: strict JSON objects, with errors that say where and what. Pure.

The two bodies printed in the EP are not valid JSON (a comma too many, a comma missing); they are refused with
the line, the column and the comma's name rather than repaired.
"""

from __future__ import annotations

import json
from typing import Any

from contextcache.errors import InvalidRequest


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises InvalidRequest naming line, column and fault."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"the body is not UTF-8: bad byte at offset {exc.start}") from exc
    try:
        parsed = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as exc:
        raise InvalidRequest(_explain(text, exc)) from exc
    except ValueError as exc:
        # Python reads no integer of more than some thousand digits.
        raise InvalidRequest("invalid JSON: a number has too many digits") from exc
    except RecursionError as exc:
        raise InvalidRequest("invalid JSON: nested too deeply") from exc
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body must be a JSON object")
    return parsed


def _refuse_constant(name: str) -> None:
    raise InvalidRequest(f"invalid JSON: {name} is not a JSON number")


def _explain(text: str, exc: json.JSONDecodeError) -> str:
    position, fault = exc.pos, exc.msg
    before = text[:position].rstrip()
    at = text[position : position + 1]
    if not text.strip():
        fault = "the body is empty"
    elif at in ("}", "]") and at and before.endswith(","):
        position, fault = len(before) - 1, f"extra comma before '{at}'"
    elif fault == "Expecting ',' delimiter":
        position, fault = len(before), "missing comma"
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return f"invalid JSON at line {line}, column {column}: {fault}"
