"""Paths of the keys that must stay maps: templates look into them, so a null there is refused by name.

Helm takes a key that is null out of the values before it looks at the schema, which could only say "required" and would
then complain of every file that leaves defaults alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from deploy.chart.section import Section

_MAPS = {"settings", "turn", "connector", "pod_security_context", "container_security_context"}
"""Fields that are no sections but whose keys templates look up."""


def sections_json(values: type[Section]) -> str:
    """Return the dotted paths as a JSON list, each after the one it is in."""
    return json.dumps(list(_paths(values)), indent=0) + "\n"


def _paths(section: type[Section], outer: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        path = f"{outer}{field.alias or name}"
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield path
            yield from _paths(inner, f"{path}.")
        elif name in _MAPS:
            yield path
