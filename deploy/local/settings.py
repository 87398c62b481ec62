"""What differs between stacks, and where it comes from: what was asked for, else the last start, else the defaults.

Only what `settings.json` can hold, so that a part can be started again, by whoever, as it was.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.local.model import MODEL_DIR
from deploy.local.paths import StackPaths
from deploy.local.ports import DEFAULT_PORT, PortPlan, plan_ports

_DEFAULTS: Mapping[str, Any] = {
    "port": DEFAULT_PORT,
    "dtype": "bfloat16",
    "engines": 1,
    "model_dir": str(MODEL_DIR),
    "dev": False,
    "engine_args": [],
    "env": {},
    "connector": {},
    "store": "",
}


@dataclass(frozen=True, slots=True)
class StackSettings:
    """One stack: where it lives and what differs between stacks."""

    paths: StackPaths
    model_dir: Path
    port: int
    dtype: str = "bfloat16"
    """`float32` makes cold and restored answers comparable to the last digit, at twice the memory."""
    engines: int = 1
    """vLLM processes, each with its sidecar and its turn process."""
    dev: bool = False
    """True: vLLM's development routes (`/reset_prefix_cache`) are on."""
    engine_args: tuple[str, ...] = ()
    """Appended to vLLM's command line."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Laid over every part's environment; the prefixes keep parts apart."""
    connector: Mapping[str, Any] = field(default_factory=dict)
    """More of the connector's `kv_connector_extra_config`."""
    store: str = ""
    """What the sidecars share: `dir`, a directory; `s3`, an S3 server that the stack starts; empty: nothing."""

    @property
    def ports(self) -> PortPlan:
        """The ports that follow from `port`."""
        return plan_ports(self.port)

    def environment(
        self, own: Mapping[str, str] | None = None, *, defaults: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Return a part's environment: `defaults`, the caller's, `own` (addresses, files, secrets), the stack's."""
        base = {"PYTHONUNBUFFERED": "1", **(defaults or {})}
        return base | dict(os.environ) | {"TMPDIR": str(self.paths.scratch), **(own or {})} | dict(self.env)


def plain(**asked: Any) -> dict[str, Any]:
    """Return what was asked for as JSON has it, what is None left out."""
    return {name: _plain(value) for name, value in asked.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, list | tuple) else value


def whole(asked: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings: what was asked for, else as of the last start, else the defaults."""
    return {name: asked.get(name, last.get(name, default)) for name, default in _DEFAULTS.items()}


def settings_of(paths: StackPaths, values: Mapping[str, Any]) -> StackSettings:
    """Return whole settings with the types they have here."""
    own = {"model_dir": Path(values["model_dir"]), "engine_args": tuple(values["engine_args"])}
    return StackSettings(paths, **{**values, **own})
