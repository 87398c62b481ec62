"""The calls of the HTTP API and their objects as Markdown, from the gateway's OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from deploy.docs.blocks import table
from gateway.http.openapi import document

Json = Mapping[str, Any]
_SHARED = {
    "Fields of every turn": ("Completion", "ChatCompletion", "AnthropicMessages", "NewResponse"),
    "Fields of every create": ("CreateFromPrompt", "CreateFromMessages"),
    "Fields of every context": ("ReadContext", "ContextObject", "ListedContext"),
    "Fields of every count": ("Used", "UsedByKey"),
}
"""Objects whose common fields are listed once."""


def http_reference(part: str) -> str:
    """Return the `calls` or the `objects`."""
    return "\n\n".join(_calls(document()) if part == "calls" else _objects(document()["components"]["schemas"]))


def _calls(api: Json) -> Iterator[str]:
    for path, methods in api["paths"].items():
        for method, call in methods.items():
            yield f"### {method.upper()} {path}"
            yield call["description"]
            if parameters := call.get("parameters"):
                rows = [
                    [f"`{one['name']}`", one["in"], _type(one["schema"]), one.get("description", "")]
                    for one in parameters
                ]
                yield table(["parameter", "in", "type", "meaning"], rows)
            if body := call.get("requestBody"):
                schema = body["content"]["application/json"]["schema"]
                if "properties" in schema:
                    yield f"Body: {schema['description']}" + ("" if body.get("required") else " It may be left out.")
                    yield _fields(schema)
                else:
                    yield f"Body: {_type(schema)}."
            yield from _answers(call["responses"])


def _answers(answers: Json) -> Iterator[str]:
    codes: list[str] = []
    for status, answer in answers.items():
        content = answer.get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        if refused := re.match(r"`code`: ([a-z_, ]+)", answer["description"]):
            codes += refused[1].split(", ")
        if status < "300":
            shown = _type(schema) if schema else answer["description"].rstrip(".")
            yield f"Answer {status}: {shown}{' or an event stream' if 'text/event-stream' in content else ''}."
    if codes:
        yield f"[Errors](errors.md): {', '.join(f'`{code}`' for code in codes)}."


def _objects(schemas: Json) -> Iterator[str]:
    told: dict[str, set[str]] = {}
    for title, names in _SHARED.items():
        first, *others = (schemas[name]["properties"] for name in names)
        common = {key: field for key, field in first.items() if all(other.get(key) == field for other in others)}
        told |= {name: set(common) for name in names}
        yield f"### {title}"
        yield _fields({"properties": common, "required": schemas[names[0]].get("required", ())})
    for name, schema in sorted(schemas.items()):
        yield f"### {name}"
        yield schema.get("description", "")
        kind = next((title for title, names in _SHARED.items() if name in names), "")
        if kind:
            yield f"It has the [{kind[0].lower()}{kind[1:]}](#{kind.lower().replace(' ', '-')})" + (
                ", and:" if schema["properties"].keys() - told[name] else "."
            )
        own = {key: field for key, field in schema["properties"].items() if key not in told.get(name, ())}
        if own:
            yield _fields({**schema, "properties": own})


def _fields(schema: Json) -> str:
    required = schema.get("required", ())
    rows = [
        [f"`{name}`" + (" (required)" if name in required else ""), _type(field), _meaning(field)]
        for name, field in schema["properties"].items()
    ]
    return table(["field", "type", "meaning"], rows)


def _meaning(field: Json) -> str:
    meaning = str(field.get("description", ""))
    default = field.get("default")
    return meaning + (f" Default: `{json.dumps(default)}`." if default not in (None, "") else "")


def _type(schema: Json) -> str:
    """Return a type in words: its choices, its bounds, and links to objects."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if choices := schema.get("anyOf"):
        return " or ".join(dict.fromkeys(_type(choice) for choice in choices if choice.get("type") != "null"))
    if words := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return ", ".join(f"`{json.dumps(word)}`" for word in words if word is not None)
    kind = schema.get("type", "any")
    kind = kind[0] if isinstance(kind, list) else kind  # the other one is null
    if kind == "array":
        return f"list of {_type(schema['items'])}" + _bounds(schema, "Items")
    if kind == "object":
        values = schema.get("additionalProperties")
        return "object" + (f" of {_type(values)}" if isinstance(values, Mapping) and values else "")
    return f"{kind}{_bounds(schema, 'Length') or _bounds(schema, 'imum')}"


def _bounds(schema: Json, of: str) -> str:
    low, high = schema.get(f"min{of}"), schema.get(f"max{of}")
    if low is None and high is None:
        return ""
    unit = {"Length": " characters", "Items": " items", "imum": ""}[of]
    if low == high:
        return f", exactly {low:g}{unit}"
    if high is None:
        return ", not empty" if unit and low == 1 else f", at least {low:g}{unit}"
    return f", at most {high:g}{unit}" if low is None else f", {low:.0f} to {high:.0f}{unit}"
