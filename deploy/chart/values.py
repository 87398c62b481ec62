"""What values.yaml says, read with its comments: for the schema, the README's tables, and the keys that must stay maps.

values.yaml is written by hand. Above every key stands its meaning (`# -- …`); behind it, where the default does not say
what the key takes, `# @schema` and a type of types.yaml, `[type]` for a list of them, or a JSON schema to add to what
the default says. `settings.GATEWAY_` and its like are the maps of a process's settings. A map without a mark is a
section: its keys are the only ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.chart.process_settings import PROCESSES, connector_schema, settings_schema

DRAFT = "https://json-schema.org/draft/2020-12/schema"
TYPES = Path(__file__).with_name("types.yaml")
_MARK = " # @schema "
_MAPS = frozenset({"securityContext", "pod", "image", "autoscaling", "issuerRef", "service", "secretKeyRef"})
"""Types of maps that templates look into, besides those of settings."""
_BY_DEFAULT = {bool: "boolean", int: "integer", float: "number", str: "string"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the values."""

    path: str
    """Dotted, from the top."""
    default: Any
    meaning: str
    type: Any
    """What stands behind `# @schema`; None: what its default is."""
    keys: Sequence[Key] | None
    """Of a section; None: it is a value."""

    @property
    def name(self) -> str:
        """Its last part."""
        return self.path.rpartition(".")[2]


class BadValues(Exception):
    """values.yaml is not as it must be; the message says where."""


def read_values(text: str) -> list[Key]:
    """Return the keys of the text of values.yaml. Raises BadValues: a key without its meaning or type."""
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    return list(_keys(root, text.splitlines(), yaml.safe_load(text), ""))


def schema_text(keys: Sequence[Key]) -> str:
    """Return values.schema.json in draft 2020-12, which Helm 3 and Helm 4 obey. Raises BadValues."""
    types = yaml.safe_load(TYPES.read_text())
    types |= {f"settings.{prefix}": settings_schema(prefix) for prefix in PROCESSES}
    types["settings.connector"] = connector_schema()
    types["securityContext"] = types["object"]
    used: dict[str, Any] = {}

    def of_type(name: str, key: Key) -> dict[str, Any]:
        if name not in types:
            raise BadValues(f"{key.path}: types.yaml has no {name}")
        used[name] = types[name]
        return {"$ref": f"#/$defs/{name}"}

    def of_key(key: Key) -> dict[str, Any]:
        if key.keys is not None:
            found = of_section(key.keys)
        elif isinstance(key.type, str):
            found = of_type(key.type, key)
        elif isinstance(key.type, list):
            found = {"type": "array", "items": of_type(key.type[0], key)}
        else:
            found = {"type": _BY_DEFAULT[type(key.default)], **(key.type or {})}
        return {"description": key.meaning, **found}

    def of_section(inner: Sequence[Key]) -> dict[str, Any]:
        return {
            "type": "object",
            "additionalProperties": False,
            "properties": {key.name: of_key(key) for key in inner},
        }

    schema = {"$schema": DRAFT, "title": "Values of the context-cache chart", **of_section(keys), "$defs": used}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def maps_text(keys: Sequence[Key]) -> str:
    """Return the paths of the keys that must stay maps as a JSON list, each after the one it is in.

    Helm takes a key that is null out of the values before it looks at the schema, which could only say "required" and
    would then complain of every file that leaves defaults alone. Templates look into these, so they refuse it by name.
    """
    return json.dumps(list(_maps(keys)), indent=0) + "\n"


def tables(keys: Sequence[Key]) -> str:
    """Return the README's tables: one for what stands alone, one for each section."""
    parts = ["### The release", "", *_table(key for key in keys if key.keys is None)]
    for section in keys:
        if section.keys is not None:
            meaning = section.meaning[:1].upper() + section.meaning[1:].rstrip(".")
            parts += ["", f"### {section.name}", "", f"{meaning}.", "", *_table(_values(section.keys))]
    return "\n".join(parts) + "\n"


def _keys(node: yaml.MappingNode, lines: Sequence[str], values: dict[str, Any], outer: str) -> Iterator[Key]:
    for key_node, value_node in node.value:
        number = key_node.start_mark.line
        path, default = f"{outer}{key_node.value}", values[key_node.value]
        mark = lines[number].partition(_MARK)[2]
        meaning = _meaning(lines, number)
        if not meaning:
            raise BadValues(f"values.yaml, line {number + 1}: {path} has no meaning (# -- …) above it")
        inner = None
        if isinstance(value_node, yaml.MappingNode) and not mark:
            if not default:
                raise BadValues(f"values.yaml, line {number + 1}: {path} is an empty map and has no type (# @schema …)")
            inner = list(_keys(value_node, lines, default, f"{path}."))
        type_ = yaml.safe_load(mark) if mark else None
        if inner is None and not isinstance(type_, str | list) and type(default) not in _BY_DEFAULT:
            raise BadValues(
                f"values.yaml, line {number + 1}: the default of {path} does not say its type (# @schema …)"
            )
        yield Key(path, default, meaning, type_, inner)


def _meaning(lines: Sequence[str], number: int) -> str:
    """Return what stands above a line, from its `# --` on."""
    told: list[str] = []
    for line in reversed(lines[:number]):
        if not (text := re.fullmatch(r" *# (-- )?(.*)", line)):
            return ""
        told.insert(0, text[2])
        if text[1]:
            return " ".join(told)
    return ""


def _maps(keys: Sequence[Key]) -> Iterator[str]:
    for key in keys:
        if key.keys is not None:
            yield key.path
            yield from _maps(key.keys)
        elif isinstance(key.type, str) and (key.type in _MAPS or key.type.startswith("settings.")):
            yield key.path


def _values(keys: Sequence[Key]) -> Iterator[Key]:
    for key in keys:
        yield from [key] if key.keys is None else _values(key.keys)


def _table(keys: Iterable[Key]) -> Iterator[str]:
    yield "| key | default | meaning |"
    yield "| --- | --- | --- |"
    for key in keys:
        default = json.dumps(key.default, ensure_ascii=False).replace("|", "\\|")
        meaning = key.meaning.replace("|", "\\|").replace("<", "&lt;")
        if isinstance(key.type, str) and key.type.startswith("settings."):
            anchor = _HEADINGS[key.type.removeprefix("settings.")]
            meaning += f": [all of them](../../docs/reference/settings.md#{anchor})"
        yield f"| `{key.path}` | `{default}` | {meaning} |"


_HEADINGS = {
    "GATEWAY_": "gateway",
    "MANAGER_": "context-manager",
    "ENVOY_": "envoy",
    "SIDECAR_": "kv-sidecar",
    "TURN_": "turn-process",
    "connector": "connector",
    "INJECTOR_": "injector",
}
"""Of docs/reference/settings.md."""
