"""values.yaml: every key with its default, below what it means."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from deploy.chart.section import Section

_HEAD = """\
# Values of the context-cache chart. Written by `python -m deploy.chart`: change the models in deploy/chart.
# A release needs one of redis.url, redis.existingSecret and valkey.enabled, and vLLM pods: engine.enabled, or your own
# with the injector.
"""
_WIDTH = 110


def values_yaml(values: type[Section]) -> str:
    """Return the text of values.yaml."""
    return _HEAD + "\n" + "\n".join(_lines(values(), 0)) + "\n"


def _lines(section: Section, depth: int) -> Iterator[str]:
    for number, (name, field) in enumerate(own_first(type(section))):
        value = getattr(section, name)
        if depth == 0 and number > 0:
            yield ""
        yield from _indented(textwrap.wrap(f"-- {field.description}", _WIDTH - 2 * depth), depth, "# ")
        key = field.alias or name
        if isinstance(value, Section):
            yield from _indented([f"{key}:"], depth)
            yield from _lines(value, depth + 1)
        else:
            yield from _indented(_entry(key, value), depth)


def own_first(section: type[Section]) -> list[tuple[str, FieldInfo]]:
    """Return a section's fields, what makes it special before the block that every component has."""
    inherited = {name for base in section.__mro__[1:] if issubclass(base, Section) for name in base.model_fields}
    return sorted(section.model_fields.items(), key=lambda item: item[0] in inherited)


def _entry(key: str, value: Any) -> list[str]:
    plain = yaml.safe_dump(_plain(value), sort_keys=False, width=10_000).splitlines()
    if isinstance(value, str) or value in ({}, []):
        return [f"{key}: {yaml.safe_dump(value, default_style=_quotes(value)).splitlines()[0]}"]
    if isinstance(value, dict | list):
        return [f"{key}:", *("  " + line for line in plain)]
    return [f"{key}: {plain[0]}"]


def _plain(value: Any) -> Any:
    """Return the value as YAML's own types: sections inside lists become maps."""
    if isinstance(value, Section):
        return value.model_dump(by_alias=True)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _quotes(value: Any) -> str | None:
    return '"' if value == "" else None


def _indented(lines: list[str], depth: int, mark: str = "") -> Iterator[str]:
    for line in lines:
        yield "  " * depth + mark + line
