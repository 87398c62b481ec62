"""Settings of every process as lists: name, default, meaning, and which value of the chart sets it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from contextcache.process.settings import TlsSettings, TracingSettings
from deploy.chart.process_settings import CHART_CONNECTOR_KEYS, CHART_SETTINGS, PROCESSES, connector_fields

SHARED = {**TlsSettings.model_fields, **TracingSettings.model_fields}
"""Fields that several processes have, told once."""


def settings_list(name: str) -> str:
    """Return the settings of the processes called `name`: a prefix, `shared` or `connector`."""
    if name == "connector":
        return "\n".join(_connector())
    if name == "shared":
        return "\n".join(
            _entry(f"…_{field.upper()}", field, info.default, info.description) for field, info in SHARED.items()
        )
    return "\n".join(_process(name))


def _process(prefix: str) -> Iterator[str]:
    for name, field in PROCESSES[prefix].model_fields.items():
        if name in SHARED and field.description == SHARED[name].description:
            continue
        default = field.get_default(call_default_factory=True)
        yield _entry(prefix + name.upper(), name, default, field.description, CHART_SETTINGS[prefix].get(name, ""))


def _connector() -> Iterator[str]:
    for field in connector_fields():
        default = PydanticUndefined if field.default is None else field.default
        yield _entry(field.name, field.name, default, field.meaning, CHART_CONNECTOR_KEYS.get(field.name, ""))


def _entry(shown: str, name: str, default: object, text: str | None, chart: str = "") -> str:
    told = f" *Chart:* {chart.partition(':')[0]}." if chart else ""
    return f"- `{shown}` ({_shown(name, default)}): {' '.join((text or '').split()).rstrip('.')}.{told}"


def _shown(name: str, default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    if default is None or default in ("", ()):
        return "empty"
    if isinstance(default, int) and name.endswith("_bytes") and default >= 1 << 20 and not default % (1 << 20):
        return f"{default >> 20} MiB" if default % (1 << 30) else f"{default >> 30} GiB"
    if isinstance(default, float) and default.is_integer():
        return str(int(default))
    return json.dumps(default, default=str) if isinstance(default, bool) else str(default)
